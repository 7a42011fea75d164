use retape_core::{DType, meta};
use retape_nn::{AttentionForm, Gpt, GptConfig, Parameter};

#[test]
fn contradictions() {
    let error = |config: GptConfig| config.validate().unwrap_err().to_string();
    let tiny = GptConfig::default;
    let prefix = "model configuration: ";
    assert_eq!(error(GptConfig { layers: 0, ..tiny() }), format!("{prefix}layers = 0: must be at least 1"));
    assert_eq!(
        error(GptConfig { heads: 3, ..tiny() }),
        format!("{prefix}dim = 128: must be a multiple of the 3 heads")
    );
    let reason = "must divide the 4 heads: each serves a run of query heads";
    assert_eq!(error(GptConfig { kv_heads: 3, ..tiny() }), format!("{prefix}kv_heads = 3: {reason}"));
    assert_eq!(error(GptConfig { kv_heads: 8, ..tiny() }), format!("{prefix}kv_heads = 8: {reason}"));
    for dropout in [1.0, -0.1, f64::NAN] {
        assert!(error(GptConfig { dropout, ..tiny() }).contains("must be a probability in [0, 1)"));
    }
    assert_eq!(error(GptConfig { dtype: DType::I64, ..tiny() }), format!("{prefix}dtype = i64: must be a float type"));
    assert!(error(GptConfig { vocab: usize::MAX, ..tiny() }).contains("more bytes than 64 bits can count"));
    assert!(Gpt::new(&meta(), &GptConfig { batch: 0, ..tiny() }, 0).is_err(), "the model checks its configuration");
}

#[test]
fn names() {
    for (name, config) in GptConfig::MODELS {
        config.validate().unwrap();
        assert_eq!(&GptConfig::named(name).unwrap(), config);
    }
    let error = GptConfig::named("gpt5").unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no model `gpt5`; the models are tiny, w1, w2, gpt2-small, gpt2-medium, gpt2-xl, gpt3-175b"
    );
    assert_eq!(GptConfig::default(), GptConfig::named("tiny").unwrap());
}

/// The published numbers of parameters.
#[test]
fn parameter_counts() {
    let count = |name| GptConfig::named(name).unwrap().parameter_count();
    assert_eq!(count("gpt2-small"), 124_439_808);
    assert_eq!(count("gpt2-medium"), 354_823_168);
    assert_eq!(count("gpt2-xl"), 1_557_611_200);
    assert_eq!(count("gpt3-175b") / 1_000_000_000, 174);
}

#[test]
fn the_count_is_what_the_model_has() {
    let variants = [
        GptConfig::default(),
        GptConfig { kv_heads: 2, ..GptConfig::default() },
        GptConfig { dtype: DType::BF16, ..GptConfig::default() },
        GptConfig { tied: false, linear_bias: false, ..GptConfig::default() },
        GptConfig::named("w2").unwrap(),
        GptConfig::named("gpt3-175b").unwrap(),
    ];
    for config in variants {
        let device = meta();
        let model = Gpt::new(&device, &config, 0).unwrap();
        assert_eq!(model.parameters().iter().map(Parameter::len).sum::<usize>(), config.parameter_count());
        assert_eq!(device.meter().live() as usize, config.parameter_bytes());
    }
}

/// 6 N tokens + 12 B L T^2 D, with N the matrices and the head.
#[test]
fn flops() {
    let w1 = GptConfig::named("w1").unwrap();
    let n = 12.0 * 6.0 * 384.0 * 384.0 + 256.0 * 384.0;
    let expected = 6.0 * n * 2.0 * 512.0 + 12.0 * 2.0 * 6.0 * 512.0 * 512.0 * 384.0;
    assert_eq!(w1.step_flops(), expected);
}

#[test]
fn json() {
    let config = GptConfig { attention: AttentionForm::Explicit, dtype: DType::BF16, ..GptConfig::default() };
    let text = serde_json::to_string(&config).unwrap();
    assert!(text.contains(r#""attention":"explicit","dtype":"bf16""#), "{text}");
    assert_eq!(serde_json::from_str::<GptConfig>(&text).unwrap(), config);
    assert!(
        serde_json::from_str::<GptConfig>(&text.replace("bf16", "f128")).unwrap_err().to_string().contains("`f128`")
    );
}

use crate::{Scratch, small};
use retape_core::{DType, MemoryKind, Role, Tape, Tensor, meta};
use retape_nn::checkpoint::{Cast, NamedTensor, save, save_parameters};
use retape_nn::{AttentionForm, Builder, Error, Gpt, GptConfig, Init, Linear, Parameter, Parameters};

const FORM: AttentionForm = AttentionForm::Flash;

fn bytes(p: &Parameter) -> Vec<u8> {
    p.tensor().to_bytes().unwrap()
}

#[test]
fn normal_numbers() {
    let device = retape_cpu::device();
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let make = |builder: &Builder, name| builder.parameter(name, &[200, 100], Init::Normal { std: 0.02 }).unwrap();
        let builder = Builder::init(&device, dtype, 5);
        let (first, second) = (make(&builder, "a"), make(&builder, "b"));
        let values = first.tensor().to_f64_vec().unwrap();
        let n = values.len() as f64;
        let moment = |power: i32| values.iter().map(|v| (v / 0.02).powi(power)).sum::<f64>() / n;
        // Standard errors: 1/sqrt(n) = 0.007 for the mean, 0.01 for the variance, 0.07 for the fourth moment.
        assert!(moment(1).abs() < 0.03, "{dtype}: mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.04, "{dtype}: variance {}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.3, "{dtype}: fourth moment {}", moment(4));
        assert_ne!(values, second.tensor().to_f64_vec().unwrap(), "each parameter has its own stream");
        let again = make(&Builder::init(&device, dtype, 5), "a");
        assert_eq!(values, again.tensor().to_f64_vec().unwrap(), "the same seed, the same numbers");
        assert_eq!(first.dtype(), dtype);
    }
    assert_eq!(device.meter().live(), 0);
}

#[test]
fn other_numbers() {
    let device = retape_cpu::device();
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let builder = Builder::init(&device, dtype, 1);
        let even = builder.parameter("even", &[10000], Init::Uniform { low: -3.0, high: 1.0 }).unwrap();
        let values = even.tensor().to_f64_vec().unwrap();
        assert!(values.iter().all(|v| (-3.0..=1.0).contains(v)));
        let mean = values.iter().sum::<f64>() / 10000.0;
        assert!((mean + 1.0).abs() < 0.05, "{dtype}: {mean}");
        for (init, value) in [(Init::ZEROS, 0.0), (Init::ONES, 1.0), (Init::Constant(-2.5), -2.5)] {
            let p = builder.parameter(&format!("{value}"), &[3], init).unwrap();
            assert_eq!(p.tensor().to_f64_vec().unwrap(), [value; 3]);
        }
    }
}

#[test]
fn recorded_in_order_under_their_paths() {
    let builder = Builder::init(&meta(), DType::F32, 0);
    assert_eq!((builder.path(), builder.parameters().len()), ("", 0));
    let h = builder.pp("h");
    for i in 0..11 {
        Linear::new(&h.pp(i), 4, 2, true, Init::ONES).unwrap();
    }
    assert_eq!(h.pp(1).path(), "h.1");
    let names = |p: &Parameters| p.iter().map(|p| p.name().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&h.pp(1).parameters()), ["h.1.weight", "h.1.bias"], "and not those of h.10");
    assert_eq!(names(&h.pp("10.bias").parameters()), ["h.10.bias"]);
    let all = builder.parameters();
    assert_eq!((all.len(), all.elements(), all.bytes()), (22, 110, 440));
    assert_eq!(all.get("h.3.bias").unwrap().shape(), [2]);
    assert!(all.get("h.3").is_none());
    let error = h.pp(3).parameter("bias", &[7], Init::ZEROS).unwrap_err();
    assert!(error.to_string().starts_with("there are two `h.3.bias`, f32[2] and f32[7];"), "{error}");
    assert_eq!(builder.parameters().len(), 22);
    builder.finish().unwrap();
}

#[test]
fn wrong_settings() {
    let builder = Builder::init(&meta(), DType::F32, 0).pp("a");
    for (init, reason) in [
        (Init::Normal { std: -1.0 }, "parameter `a.w`: std = -1 must be finite"),
        (Init::Normal { std: f64::NAN }, "std = NaN"),
        (Init::Uniform { low: 1.0, high: 0.0 }, "low = 1 and high = 0 must be finite, and low at most high"),
        (Init::Uniform { low: f64::MIN, high: f64::MAX }, "must be finite"),
    ] {
        let error = builder.parameter("w", &[1], init).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let error = Builder::init(&meta(), DType::I64, 0).parameter("w", &[1], Init::ONES).unwrap_err().to_string();
    assert!(error.contains("`w`: its dtype is i64"), "{error}");
    let error = Gpt::build(&builder, &GptConfig { dtype: DType::F64, ..small(FORM) }).unwrap_err().to_string();
    assert!(error.contains("its parameters are f64, the builder makes f32"), "{error}");
}

#[test]
fn frozen_by_name() {
    let parameters = Gpt::new(&meta(), &small(FORM), 0).unwrap().parameters();
    let frozen = || parameters.iter().filter(|p| !p.requires_grad()).map(Parameter::name).collect::<Vec<_>>();
    assert_eq!(parameters.freeze("**").unwrap(), parameters.len());
    assert_eq!(parameters.unfreeze("transformer.h.*.{attn,mlp}.**").unwrap(), 16);
    assert_eq!(frozen().len(), parameters.len() - 16);
    assert_eq!(parameters.unfreeze("**").unwrap(), parameters.len());
    assert_eq!(parameters.freeze("transformer.w[tp]e.weight").unwrap(), 2);
    assert_eq!(frozen(), ["transformer.wte.weight", "transformer.wpe.weight"]);

    let error = |pattern: &str| parameters.freeze(pattern).unwrap_err().to_string();
    let unmatched = error("transformer.h.0.ln1.*");
    assert!(
        unmatched.starts_with(
            "the pattern `transformer.h.0.ln1.*` matches no parameter; near ones are `transformer.h.0.ln_"
        ),
        "{unmatched}"
    );
    for (pattern, reason) in [
        ("", "is empty"),
        ("a/b", "segments are separated by `.`"),
        ("a**", "inside a segment"),
        ("a.{b", "can't be read"),
        (&"*.".repeat(1 << 16)[..], "has 131072 bytes, more than"),
    ] {
        assert!(error(pattern).contains(reason), "{}", error(pattern));
    }
    assert_eq!(frozen().len(), 2, "an error changes nothing");
    let none = Parameters::default().freeze("**").unwrap_err().to_string();
    assert!(none.ends_with("matches no parameter; there are none"), "{none}");
}

/// A frozen parameter has no gradient, and its path stays.
#[test]
fn scopes_have_the_parameters_paths() {
    let device = retape_cpu::device();
    let builder = Builder::init(&device, DType::F64, 0);
    let layer = Linear::new(&builder.pp("a").pp("b"), 2, 2, true, Init::ONES).unwrap();
    builder.parameters().freeze("a.b.bias").unwrap();
    let tape = Tape::new(&device);
    let x = tape.leaf(&Tensor::full(&device, &[1, 2], DType::F64, 1.0).unwrap()).unwrap();
    let around = builder.pp("a").scope().role(Role::Block);
    let y = x.within(around, |x| layer.forward(x)).unwrap();
    assert_eq!(y.path(), "a");
    let gradients = tape.backward(&y.sum().unwrap()).unwrap();
    assert!(gradients.parameter(layer.weight.id()).is_some());
    assert!(gradients.parameter(layer.bias.unwrap().id()).is_none());
}

#[test]
fn loads_what_was_saved() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("builder");
    let path = scratch.path("model.safetensors");
    let config = small(FORM);
    let saved = Gpt::new(&device, &config, 1).unwrap().parameters();
    save_parameters(&path, &saved, &[]).unwrap();

    let other = retape_cpu::device();
    let loaded = Gpt::load(&path, &other, &config, Cast::Refuse).unwrap().parameters();
    assert_eq!(loaded.len(), saved.len());
    for (a, b) in saved.iter().zip(&loaded) {
        assert_eq!((a.name(), bytes(a)), (b.name(), bytes(b)));
    }
    assert_eq!(other.meter().live(), other.meter().live_of(MemoryKind::Parameter));
    assert_eq!(other.meter().peak(), saved.bytes() as u64, "nothing is drawn, and nothing is there twice");

    let dry = meta();
    Gpt::load(&path, &dry, &config, Cast::Refuse).unwrap();
    assert_eq!(dry.meter().peak(), saved.bytes() as u64);

    let wide = GptConfig { dtype: DType::F64, ..config.clone() };
    for device in [retape_cpu::device(), meta()] {
        let error = Gpt::load(&path, &device, &wide, Cast::Refuse).unwrap_err();
        assert!(matches!(&error, Error::WrongDType { castable: true, .. }), "{error}");
        Gpt::load(&path, &device, &wide, Cast::Allow).unwrap();
        let error = Gpt::load(&path, &device, &GptConfig { layers: 3, ..config.clone() }, Cast::Refuse).unwrap_err();
        assert!(error.to_string().ends_with("has no tensor `transformer.h.2.ln_1.weight`"), "{error}");
        let error = Gpt::load(&path, &device, &GptConfig { layers: 1, ..config.clone() }, Cast::Refuse).unwrap_err();
        let text = "has a tensor `transformer.h.1.attn.c_attn.bias` that this model has not (and 11 more)";
        assert!(error.to_string().ends_with(text), "{error}");
        let error = Gpt::load(&path, &device, &GptConfig { vocab: 12, ..config.clone() }, Cast::Refuse).unwrap_err();
        assert!(error.to_string().contains("`transformer.wte.weight` in ") && error.to_string().contains("[11, 8]"));
        assert!(error.to_string().ends_with("this model needs [12, 8]"), "{error}");
    }
}

/// A file may have both names of a tied weight, where the numbers are the same.
#[test]
fn tied_weights() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("tied");
    let path = scratch.path("model.safetensors");
    let config = small(FORM);
    let saved = Gpt::new(&device, &config, 1).unwrap().parameters();
    assert!(saved.get("lm_head.weight").is_none());
    let with_head = |head: Tensor| {
        let named = |p: &Parameter| NamedTensor { name: p.name().into(), tensor: p.tensor() };
        let head = NamedTensor { name: "lm_head.weight".into(), tensor: head };
        save(&path, &saved.iter().map(named).chain([head]).collect::<Vec<_>>(), &[]).unwrap();
        Gpt::load(&path, &device, &config, Cast::Refuse)
    };
    let wte = saved.get("transformer.wte.weight").unwrap().tensor();
    let loaded = with_head(wte.copy(MemoryKind::Input).unwrap()).unwrap().parameters();
    assert_eq!((loaded.len(), loaded.elements()), (saved.len(), config.parameter_count()));
    save_parameters(&path, &loaded, &[]).unwrap();
    assert!(!retape_nn::checkpoint::open(&path).unwrap().contains("lm_head.weight"), "saved once");

    let error = with_head(Tensor::full(&device, &[11, 8], DType::F32, 0.0).unwrap()).unwrap_err();
    assert!(matches!(error, Error::TiedTensorsDiffer { .. }));
    assert!(
        error.to_string().contains("other numbers for `lm_head.weight` than for `transformer.wte.weight`"),
        "{error}"
    );
    with_head(wte.transpose(0, 1).unwrap()).unwrap_err();

    let builder = Builder::init(&device, DType::F64, 0);
    let w = builder.parameter("w", &[1], Init::ONES).unwrap();
    builder.tie("a", &w).unwrap();
    assert!(matches!(builder.parameter("a", &[1], Init::ONES), Err(Error::DuplicateName { .. })));
    assert_eq!(builder.parameters().len(), 1);
}

/// A model in a model: its parameters and its values are under its path.
#[test]
fn nested() {
    let device = retape_cpu::device();
    let builder = Builder::init(&device, DType::F32, 3);
    let config = small(FORM);
    let models = ["a", "b"].map(|name| Gpt::build(&builder.pp(name), &config).unwrap());
    let parameters = models[1].parameters();
    assert!(parameters.iter().all(|p| p.name().starts_with("b.")));
    assert_eq!(parameters.elements(), config.parameter_count());
    let alone = Gpt::new(&device, &config, 3).unwrap().parameters();
    assert!(alone.iter().zip(&models[0].parameters()).all(|(a, b)| bytes(a) == bytes(b)), "the first are drawn first");
    let tokens = Tensor::full(&device, &[2, 6], DType::I64, 0.0).unwrap();
    let tape = Tape::new(&device);
    assert_eq!(models[1].loss(&tape, &tokens, &tokens).unwrap().path(), "b.loss");
    assert_eq!(models[1].embed(&tape, &tokens).unwrap().path(), "b.transformer.embed");
}

/// Paths that no pattern could name, or no file hold, are refused; so is a tie to what another builder has made.
#[test]
fn odd_paths_and_foreign_ties_are_refused() {
    let device = retape_core::meta();
    let builder = Builder::init(&device, DType::F32, 0);
    let foreign = Builder::init(&device, DType::F32, 0).parameter("wte", &[2], Init::ZEROS).unwrap();
    for (path, name) in [("", ""), ("a", ".b"), ("a..b", "c"), ("", "__metadata__"), ("a/b", "c")] {
        let error = builder.pp(path).parameter(name, &[2], Init::ZEROS).unwrap_err().to_string();
        assert!(error.contains("up.weight"), "{path}, {name}: {error}");
    }
    let error = builder.tie("head", &foreign).unwrap_err().to_string();
    assert!(error.contains("wte") && error.contains("hasn't made"), "{error}");
    assert!(builder.parameters().is_empty());
}

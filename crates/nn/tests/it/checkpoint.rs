use crate::{Scratch, gradients, parameter};
use retape_core::{DType, MemoryKind, Tensor, meta};
use retape_nn::checkpoint::{
    Cast, NamedTensor, load_parameters, load_training, open, save, save_parameters, save_training,
};
use retape_nn::{AdamW, AdamWConfig, Error, Gpt, GptConfig, LossScaler, Parameter, Random};

fn values(p: &Parameter) -> Vec<f64> {
    p.tensor().to_f64_vec().unwrap()
}

#[test]
fn a_model_there_and_back() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("model");
    let path = scratch.path("model.safetensors");
    let config = GptConfig { layers: 1, dim: 8, heads: 2, kv_heads: 2, seq: 4, vocab: 9, ..GptConfig::default() };
    let saved = Gpt::new(&device, &config, 1).unwrap();
    save_parameters(&path, &saved.parameters(), &[("step", "17".into())]).unwrap();
    assert_eq!(scratch.files(), ["model.safetensors"], "no temporary file is left");
    assert_eq!(open(&path).unwrap().metadata()["step"], "17");
    let loaded = Gpt::new(&device, &config, 2).unwrap();
    load_parameters(&path, &loaded.parameters(), Cast::Refuse).unwrap();
    for (a, b) in saved.parameters().iter().zip(loaded.parameters()) {
        assert_eq!(a.tensor().to_bytes().unwrap(), b.tensor().to_bytes().unwrap(), "{}", a.name());
    }
    assert_eq!(device.meter().live(), device.meter().live_of(MemoryKind::Parameter));
    assert_eq!(device.meter().live() as usize, 2 * config.parameter_bytes());
}

#[test]
fn every_dtype_and_a_strided_view() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("dtypes");
    let path = scratch.path("all.safetensors");
    let numbers = Tensor::from_slice(&device, &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.5]).unwrap();
    let view = numbers.transpose(0, 1).unwrap();
    let named =
        |dtype: DType| NamedTensor { name: dtype.to_string(), tensor: view.cast(dtype, MemoryKind::Input).unwrap() };
    let mut tensors: Vec<NamedTensor> = DType::ALL.into_iter().map(named).collect();
    tensors.push(NamedTensor { name: "view".into(), tensor: view });
    tensors
        .push(NamedTensor { name: "empty".into(), tensor: Tensor::full(&device, &[0, 3], DType::F32, 0.0).unwrap() });
    tensors.push(NamedTensor { name: "scalar".into(), tensor: Tensor::full(&device, &[], DType::F64, 2.5).unwrap() });
    save(&path, &tensors, &[]).unwrap();
    let file = open(&path).unwrap();
    assert_eq!(file.names().len(), tensors.len());
    for NamedTensor { name, tensor } in &tensors {
        let read = file.read(name, &device).unwrap();
        assert_eq!((read.shape(), read.dtype()), (tensor.shape(), tensor.dtype()), "{name}");
        assert_eq!(read.to_bytes().unwrap(), tensor.to_bytes().unwrap(), "{name}");
    }
}

#[test]
fn each_mistake_has_its_error() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("mistakes");
    let path = scratch.path("two.safetensors");
    let two = [parameter(&device, "a", &[2], &[1.0, 2.0]), parameter(&device, "b", &[1], &[3.0])];
    save_parameters(&path, &two, &[]).unwrap();
    let p = |name: &str, shape: &[usize]| parameter(&device, name, shape, &vec![0.0; shape.iter().product()]);

    let a = p("a", &[2]);
    let error =
        load_parameters(&path, &[a.clone(), p("b", &[1]), p("c", &[1]), p("d", &[1])], Cast::Refuse).unwrap_err();
    assert!(matches!(&error, Error::MissingTensor { name, more: 1, .. } if name == "c"), "{error}");
    assert!(error.to_string().ends_with("two.safetensors has no tensor `c` (and 1 more)"), "{error}");

    let error = load_parameters(&path, std::slice::from_ref(&a), Cast::Refuse).unwrap_err();
    assert!(matches!(&error, Error::UnexpectedTensor { name, more: 0, .. } if name == "b"), "{error}");

    let error = load_parameters(&path, &[a.clone(), p("b", &[1, 1])], Cast::Refuse).unwrap_err();
    assert!(matches!(&error, Error::WrongShape { name, .. } if name == "b"), "{error}");
    assert_eq!(values(&a), [0.0, 0.0], "a file that was refused changed nothing");

    let narrow = Parameter::new("b", Tensor::full(&device, &[1], DType::F32, 0.0).unwrap()).unwrap();
    let both = [a.clone(), narrow.clone()];
    let error = load_parameters(&path, &both, Cast::Refuse).unwrap_err();
    assert!(matches!(&error, Error::WrongDType { castable: true, .. }), "{error}");
    assert!(error.to_string().contains("is f64, this model needs f32; allow the cast"), "{error}");
    load_parameters(&path, &both, Cast::Allow).unwrap();
    assert_eq!(values(&a), [1.0, 2.0]);
    assert_eq!(narrow.tensor().to_vec::<f32>().unwrap(), [3.0]);

    let integers = scratch.path("integers.safetensors");
    let tensor = Tensor::from_slice(&device, &[1], &[3i64]).unwrap();
    save(&integers, &[NamedTensor { name: "b".into(), tensor }], &[]).unwrap();
    let error = load_parameters(&integers, &[p("b", &[1])], Cast::Allow).unwrap_err();
    assert!(matches!(&error, Error::WrongDType { castable: false, .. }), "{error}");
}

#[test]
fn files_that_are_no_checkpoints() {
    let scratch = Scratch::new("garbage");
    assert!(matches!(open(&scratch.path("none")), Err(Error::File { action: "read", .. })));
    let whole = scratch.path("whole");
    save_parameters(&whole, &[parameter(&retape_cpu::device(), "a", &[2], &[1.0, 2.0])], &[]).unwrap();
    let bytes = std::fs::read(&whole).unwrap();
    let cut = scratch.path("cut");
    for keep in [0, 4, 20, bytes.len() - 1] {
        std::fs::write(&cut, &bytes[..keep]).unwrap();
        assert!(matches!(open(&cut), Err(Error::NotSafetensors { .. })), "{keep} bytes");
    }
}

/// A save that fails leaves the old file, and nothing beside it.
#[test]
fn a_failed_save_leaves_what_was_there() {
    let scratch = Scratch::new("atomic");
    let path = scratch.path("model.safetensors");
    let device = retape_cpu::device();
    save_parameters(&path, &[parameter(&device, "a", &[1], &[1.0])], &[]).unwrap();
    let before = std::fs::read(&path).unwrap();
    let result = retape_nn::checkpoint::write_atomically(&path, |temporary| {
        std::fs::write(temporary, "half of it")?;
        Err(std::io::Error::other("the disk is full"))
    });
    let error = result.unwrap_err().to_string();
    assert!(error.starts_with("can't write ") && error.ends_with("the disk is full"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(scratch.files(), ["model.safetensors"]);

    let nowhere = scratch.path("no such directory/model.safetensors");
    let save = save_parameters(&nowhere, &[parameter(&device, "a", &[1], &[1.0])], &[]);
    assert!(matches!(save, Err(Error::File { action: "write", .. })));
    let save = save_parameters(&path, &[parameter(&meta(), "a", &[1], &[1.0])], &[]);
    assert!(matches!(save, Err(Error::Core(retape_core::Error::NoNumbers { .. }))));
}

/// Stopping after any step and going on from the file gives the same bits.
#[test]
fn training_goes_on() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("training");
    let path = scratch.path("run.safetensors");
    let config = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let run = |stop_after: usize| {
        let mut w = parameter(&device, "w", &[2], &[1.0, -3.0]);
        let mut optimizer = AdamW::decay_all(vec![w.clone()], config).unwrap();
        for i in 0..4 {
            if i == stop_after {
                save_training(&path, std::slice::from_ref(&w), &optimizer, &[("step", i.to_string())]).unwrap();
                w = parameter(&device, "w", &[2], &[0.0, 0.0]);
                optimizer = AdamW::decay_all(vec![w.clone()], config).unwrap();
                let metadata = load_training(&path, std::slice::from_ref(&w), Some(&mut optimizer)).unwrap();
                assert_eq!(metadata["step"], i.to_string());
            }
            optimizer.step(&gradients(&device, &[(&w, &[0.3 + i as f64, -2.0])]), 1.0).unwrap();
        }
        values(&w)
    };
    let whole = run(usize::MAX);
    assert!((0..4).all(|stop_after| run(stop_after) == whole));

    let w = parameter(&device, "w", &[2], &[0.0, 0.0]);
    load_training(&path, std::slice::from_ref(&w), None).unwrap();
    assert_ne!(values(&w), [0.0, 0.0], "the parameters alone");
    let error = load_parameters(&path, &[w], Cast::Refuse).unwrap_err();
    assert!(matches!(error, Error::UnexpectedTensor { name, .. } if name == "w.m"));
}

/// Reading is linear: the header once, each tensor once, and nothing else; and no more than one tensor is there twice.
#[test]
fn a_file_is_read_once() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("linear");
    let path = scratch.path("many.safetensors");
    let many = |device, value: f64| -> Vec<Parameter> {
        (0..400).map(|i| parameter(device, &format!("p{i}"), &[8], &[value + i as f64; 8])).collect()
    };
    save_parameters(&path, &many(&device, 0.5), &[]).unwrap();
    let length = std::fs::metadata(&path).unwrap().len();
    let file = open(&path).unwrap();
    assert_eq!(file.bytes_read(), length - 400 * 64, "the header");
    let names = file.names();
    assert_eq!((names.len(), file.contains("p399"), file.contains("p400")), (400, true, false));
    file.only(|name| name.starts_with('p')).unwrap();
    for (i, name) in names.iter().enumerate() {
        assert!(file.tensor(name, &device, &[9], DType::F64, Cast::Refuse, MemoryKind::Input).is_err());
        file.tensor(name, &device, &[8], DType::F64, Cast::Refuse, MemoryKind::Input).unwrap();
        assert_eq!(file.bytes_read(), length - 64 * (399 - i as u64));
    }

    let other = retape_cpu::device();
    let loaded = many(&other, 0.0);
    other.meter().reset_peak();
    let before = other.meter().live();
    load_parameters(&path, &loaded, Cast::Refuse).unwrap();
    assert_eq!(other.meter().peak(), before + 64, "one tensor at a time");
    assert!(loaded.iter().enumerate().all(|(i, p)| values(p) == [0.5 + i as f64; 8]));
}

/// A tied weight that is listed twice is one tensor of the file; two parameters of one name are an error that shows
/// both.
#[test]
fn each_name_is_saved_once() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("names");
    let path = scratch.path("model.safetensors");
    let (tied, other) = (parameter(&device, "w", &[2], &[1.0, 2.0]), parameter(&device, "v", &[1], &[3.0]));
    save_parameters(&path, &[tied.clone(), other.clone(), tied.clone()], &[]).unwrap();
    assert_eq!(open(&path).unwrap().names(), ["v", "w"]);
    load_parameters(&path, &[tied.clone(), other.clone(), tied.clone()], Cast::Refuse).unwrap();
    assert_eq!(values(&tied), [1.0, 2.0]);
    let before = std::fs::read(&path).unwrap();

    let namesake = Parameter::new("w", Tensor::full(&device, &[3], DType::F32, 0.0).unwrap()).unwrap();
    let config = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = AdamW::decay_all(vec![tied.clone(), namesake.clone()], config).unwrap();
    let both = [tied.clone(), namesake.clone()];
    let twice = both.each_ref().map(|p| NamedTensor { name: p.name().into(), tensor: p.tensor() });
    optimizer.step(&gradients(&device, &[(&tied, &[1.0, 1.0])]), 1.0).unwrap();
    for result in [
        save(&path, &twice, &[]),
        save_parameters(&path, &both, &[]),
        save_training(&path, &both, &optimizer, &[]),
        load_parameters(&path, &both, Cast::Allow),
        load_training(&path, &both, Some(&mut optimizer)).map(drop),
        optimizer.load(&path),
    ] {
        let error = result.unwrap_err();
        let text = error.to_string();
        if matches!(error, Error::UnexpectedTensor { .. }) {
            continue; // the optimizer's own file has other names
        }
        assert!(matches!(error, Error::DuplicateName { .. }), "{text}");
        assert!(text.contains("`w`") && text.contains("f64[2]") && text.contains("f32[3]"), "{text}");
    }
    // Of the optimizer's state and a parameter.
    let state = parameter(&device, "w.m", &[2], &[1.0, 2.0]);
    let error = save_training(&path, &[tied, state], &optimizer, &[]).unwrap_err();
    assert!(matches!(error, Error::DuplicateName { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

/// What a run needs beside its tensors goes into the metadata and comes back.
#[test]
fn random_and_scaler_go_with_the_run() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("random");
    let path = scratch.path("run.safetensors");
    let w = parameter(&device, "w", &[1], &[1.0]);
    let config = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = AdamW::decay_all(vec![w.clone()], config).unwrap();
    let mut random = Random::new(u64::MAX);
    random.next_seed();
    let texts = [
        ("random", serde_json::to_string(&random).unwrap()),
        ("scaler", serde_json::to_string(&LossScaler::default()).unwrap()),
    ];
    save_training(&path, std::slice::from_ref(&w), &optimizer, &texts).unwrap();
    let metadata = load_training(&path, &[w], Some(&mut optimizer)).unwrap();
    let mut again: Random = serde_json::from_str(&metadata["random"]).unwrap();
    assert_eq!(again.next_seed(), random.next_seed());
    assert_eq!(serde_json::from_str::<LossScaler>(&metadata["scaler"]).unwrap(), LossScaler::default());
}

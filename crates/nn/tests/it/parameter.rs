use crate::parameter;
use retape_core::{DType, Kind, Tensor};
use retape_nn::{Error, Initializer, Parameter};

#[test]
fn counted_in_storage_of_its_own() {
    let device = retape_cpu::device();
    let table = Tensor::from_slice(&device, &[2, 2], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    let p = Parameter::new("p", table.transpose(0, 1).unwrap()).unwrap();
    assert!(!p.tensor().shares_storage(&table));
    assert_eq!(p.tensor().to_vec::<f64>().unwrap(), [1.0, 3.0, 2.0, 4.0]);
    assert_eq!(device.meter().live_of(Kind::Parameter), 32);
    assert_eq!(device.meter().live_of(Kind::Input), 32);
}

#[test]
fn a_replacement_must_fit() {
    let device = retape_cpu::device();
    let p = parameter(&device, "p", &[2], &[1.0, 2.0]);
    p.set(Tensor::from_slice(&device, &[2], &[5.0, 6.0]).unwrap()).unwrap();
    assert_eq!(p.clone().tensor().to_vec::<f64>().unwrap(), [5.0, 6.0], "clones share the cell");
    let other_device = Tensor::from_slice(&retape_cpu::device(), &[2], &[5.0, 6.0]).unwrap();
    let other_shape = Tensor::from_slice(&device, &[1, 2], &[5.0, 6.0]).unwrap();
    let other_dtype = Tensor::full(&device, &[2], DType::F32, 0.0).unwrap();
    for wrong in [other_device, other_shape, other_dtype] {
        assert!(matches!(p.set(wrong), Err(Error::WrongReplacement { .. })));
    }
    assert_eq!(device.meter().live_of(Kind::Parameter), 16);
}

#[test]
fn normal_numbers() {
    let device = retape_cpu::device();
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let mut init = Initializer::new(&device, dtype, 5);
        let (first, second) =
            (init.normal("a", &[200, 100], 0.02).unwrap(), init.normal("b", &[200, 100], 0.02).unwrap());
        let values = first.tensor().to_f64_vec().unwrap();
        let n = values.len() as f64;
        let moment = |power: i32| values.iter().map(|v| (v / 0.02).powi(power)).sum::<f64>() / n;
        // Standard errors: 1/sqrt(n) = 0.007 for the mean, 0.01 for the variance, 0.07 for the fourth moment.
        assert!(moment(1).abs() < 0.03, "{dtype}: mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.04, "{dtype}: variance {}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.3, "{dtype}: fourth moment {}", moment(4));
        assert_ne!(values, second.tensor().to_f64_vec().unwrap(), "each parameter has its own stream");
        let again = Initializer::new(&device, dtype, 5).normal("a", &[200, 100], 0.02).unwrap();
        assert_eq!(values, again.tensor().to_f64_vec().unwrap(), "the same seed, the same numbers");
        assert_eq!(first.dtype(), dtype);
    }
    assert_eq!(device.meter().live(), 0);
}

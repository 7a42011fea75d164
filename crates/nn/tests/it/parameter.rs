use crate::parameter;
use retape_core::{DType, MemoryKind, Tensor};
use retape_nn::{Error, Parameter};

#[test]
fn counted_in_storage_of_its_own() {
    let device = retape_cpu::device();
    let table = Tensor::from_slice(&device, &[2, 2], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    let p = Parameter::new("p", table.transpose(0, 1).unwrap()).unwrap();
    assert!(!p.tensor().shares_storage(&table));
    assert_eq!(p.tensor().to_vec::<f64>().unwrap(), [1.0, 3.0, 2.0, 4.0]);
    assert_eq!(device.meter().live_of(MemoryKind::Parameter), 32);
    assert_eq!(device.meter().live_of(MemoryKind::Input), 32);
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
    assert_eq!(device.meter().live_of(MemoryKind::Parameter), 16);
}

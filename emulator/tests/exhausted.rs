//! Memory that runs out at every place of a step: an error, nothing lost, and the device goes on. A process of its own,
//! as the emulated device's size and counts are the process's.

use retape_core::ops::attention::AttentionOptions;
use retape_core::{DType, Device, Error, MemoryKind, Result, Tape, Tensor};
use retape_cuda_emulator::{counts, set_memory};

fn step(device: &Device) -> Result<(f64, Vec<u8>)> {
    let input = |shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        Tensor::from_slice(device, shape, &values)
    };
    let tape = Tape::new(device);
    let table = tape.leaf(&input(&[7, 64])?)?;
    let ids = tape.constant(&Tensor::from_slice(device, &[60], &vec![3i64; 60])?)?;
    let x = table.clone().embedding(&ids)?.softmax()?.layer_norm(None, None, 1e-5)?;
    let heads = x.reshape(&[60, 4, 16])?;
    let lengths = [1, 9, 0, 50];
    let y = heads.clone().attention_ragged(&heads, &heads, &lengths, &lengths, AttentionOptions::default())?;
    let loss = y.clone().sum_dims(&[0], false)?.mul(&y)?.var(&[0, 1, 2], 1.0, false)?;
    let gradients = tape.backward(&loss)?;
    Ok((loss.item()?, gradients.of(&table).expect("the loss depends on it").to_bytes()?))
}

#[test]
fn a_step_may_run_out_of_memory_anywhere() {
    if retape_cuda_emulator::tests_gpu() {
        return;
    }
    const PLENTY: u64 = 1 << 30;
    let device = retape_cuda_emulator::device();
    set_memory(PLENTY);
    let expected = step(&device).unwrap();
    let kept = counts();
    let peak = device.meter().peak();
    let mut failures = 0;
    for part in 0..8 {
        // A device that has made no scratch yet, and one that has.
        for device in [&retape_cuda_emulator::device(), &device] {
            // What asks for too much has the pool give back what it keeps.
            let vast = Tensor::uninit(device, &[1 << 50], DType::U8, MemoryKind::Input);
            assert!(matches!(vast, Err(Error::OutOfMemory { .. })), "{vast:?}");
            assert_eq!(counts().kept, 0);
            set_memory(counts().bytes + peak * part / 8);
            match step(device) {
                Ok(result) => assert!(result == expected, "{part}"),
                Err(Error::OutOfMemory { .. }) => failures += 1,
                Err(error) => panic!("{part}: {error}"),
            }
            assert_eq!(device.meter().live(), 0, "{part}");
            set_memory(PLENTY);
            assert!(step(device).unwrap() == expected, "{part}: afterwards");
        }
        assert_eq!((counts().allocations, counts().bytes), (kept.allocations, kept.bytes), "{part}");
    }
    assert!(failures >= 8, "{failures}");
    assert!(step(&device).unwrap() == expected);
}

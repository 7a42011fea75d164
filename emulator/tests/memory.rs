//! Memory that runs out, and what is left when all is let go. A process of its own, as the emulated device's size and
//! counts are the process's.

use retape_core::{DType, Error, MemoryKind, Tensor};
use retape_cuda_emulator::{counts, set_memory};

#[test]
fn memory_runs_out_and_comes_back() {
    let device = retape_cuda_emulator::device();
    if retape_cuda_emulator::tests_gpu() {
        return;
    }
    let make = |bytes: usize| Tensor::uninit(&device, &[bytes], DType::U8, MemoryKind::Input);
    set_memory(1000);
    let first = make(600).unwrap();
    match make(500) {
        Err(Error::OutOfMemory { requested: 500, in_use: 600, limit: 1000 }) => (),
        other => panic!("{other:?}"),
    }
    assert_eq!(counts().trims, 1, "the pool was asked to give back what it keeps");
    let second = make(400).unwrap();
    assert_eq!((counts().allocations, counts().bytes, counts().kept), (2, 1000, 0));

    // What is freed stays with the pool, in its size ..
    drop(first);
    assert_eq!((counts().bytes, counts().kept), (400, 600));
    let again = make(600).unwrap();
    assert_eq!((counts().bytes, counts().kept, counts().trims), (1000, 0, 1));
    // .. until memory of another size is wanted.
    drop(again);
    let other = make(500).unwrap();
    assert_eq!((counts().bytes, counts().kept, counts().trims), (900, 0, 2));
    assert_eq!(make(100).unwrap().len(), 100);

    drop((second, other));
    set_memory(4 << 30);
    assert_eq!((counts().allocations, counts().bytes), (0, 0));
    assert_eq!((counts().streams, counts().pinned), (1, 1));

    // The last handle goes in a thread that never used the device.
    std::thread::spawn(move || drop(device)).join().unwrap();
    let left = counts();
    assert_eq!((left.allocations, left.modules, left.streams, left.pinned), (0, 0, 0, 0));
}

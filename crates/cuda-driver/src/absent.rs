//! Where there are no trampolines: no device.

macro_rules! driver_functions {
    ($($index:literal $name:ident,)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> i32 {
            100 // CUDA_ERROR_NO_DEVICE
        }
    )*};
}
include!("functions.rs");

//! One trampoline for each function, in x86-64 assembly.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Finds the function and fills its slot. Called by a trampoline with an empty slot.
extern "C" fn resolve(index: usize) -> *mut () {
    let name = NAMES[index];
    let found = super::function(name).map(<*const ()>::cast_mut);
    let address = found.unwrap_or(match name {
        // cust's Display of an error fails, and formatting panics, where this one does.
        "cuGetErrorString" | "cuGetErrorName" => error_text as *mut (),
        _ if super::missing().is_some() => no_device as *mut (),
        _ => not_found as *mut (),
    });
    SLOTS[index].store(address, Ordering::Release);
    address
}

extern "C" fn no_device() -> c_int {
    100 // CUDA_ERROR_NO_DEVICE
}

extern "C" fn not_found() -> c_int {
    500 // CUDA_ERROR_NOT_FOUND
}

extern "C" fn error_text(code: c_int, text: *mut *const c_char) -> c_int {
    let name: &CStr = match code {
        100 => c"there is no CUDA driver or no device",
        500 => c"this CUDA driver lacks the function",
        _ => c"CUDA error",
    };
    // SAFETY: the driver API's contract: `text` is where to write the address of a text that lives forever.
    unsafe { *text = name.as_ptr() };
    0
}

// Keeps what the six integer argument registers hold while `resolve` runs; no driver function that cust calls takes
// floats. Entered by a jump with the index in r11, the caller's return address on top of the stack, and leaves by a
// jump.
std::arch::global_asm!(
    ".globl retape_cuda_bind",
    ".hidden retape_cuda_bind",
    "retape_cuda_bind:",
    "push rdi",
    "push rsi",
    "push rdx",
    "push rcx",
    "push r8",
    "push r9",
    "sub rsp, 8", // the stack is 16-byte aligned at a call
    "mov rdi, r11",
    "call {resolve}",
    "mov r11, rax",
    "add rsp, 8",
    "pop r9",
    "pop r8",
    "pop rcx",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "jmp r11",
    resolve = sym resolve,
);

macro_rules! driver_functions {
    ($($index:literal $name:ident,)*) => {
        const COUNT: usize = [$($index),*].len();
        static NAMES: [&str; COUNT] = [$(stringify!($name)),*];
        static SLOTS: [AtomicPtr<()>; COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];
        $(std::arch::global_asm!(
            concat!(".globl ", stringify!($name)),
            concat!(".type ", stringify!($name), ", @function"),
            concat!(stringify!($name), ":"),
            "mov r11, qword ptr [rip + {slots} + 8 * {index}]",
            "test r11, r11",
            "je 2f",
            "jmp r11",
            "2:",
            "mov r11d, {index}",
            "jmp retape_cuda_bind",
            slots = sym SLOTS,
            index = const $index,
        );)*
    };
}
include!("functions.rs");

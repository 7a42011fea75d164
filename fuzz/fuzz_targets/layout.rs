#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| retape_tests::fuzz::layout(bytes));

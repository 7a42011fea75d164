//! Every reduction and scatter at 4 million equal addends, against the closed form.

use retape_core::DType;
use retape_tests::sums::{assert_close, of_equal_addends, of_products};

const N: usize = 4_000_000;

#[test]
fn the_error_of_a_sum_does_not_grow_with_its_length() {
    let device = retape_cpu::device();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // f16 holds no more of the sum that is added to another one.
        let n = if dtype == DType::F16 { N / 2 } else { N };
        let found = of_equal_addends(&device, dtype, n).unwrap();
        assert!(found.len() > 30);
        assert_close(dtype, &found, 1e-6);
    }
}

#[test]
fn nor_does_that_of_a_product() {
    let device = retape_cpu::device();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        assert_close(dtype, &of_products(&device, dtype, N).unwrap(), 5e-5);
    }
}

//! Shapes and indices as users write them: PyTorch's meaning, and a clear refusal of what has none.

use retape_core::ops::index::Index;
use retape_core::{BackwardOptions, DType, Error, Result, Tape, Tensor, Var, meta};
use retape_tests::floats;

/// 0, 1, 2, .. in this shape.
fn counting(tape: &Tape, shape: &[usize]) -> Var {
    let values: Vec<f64> = (0..shape.iter().product::<usize>()).map(|i| i as f64).collect();
    tape.leaf(&floats(&tape.device(), shape, &values, DType::F64)).unwrap()
}

fn ids(tape: &Tape, shape: &[usize], values: &[i64]) -> Var {
    tape.constant(&Tensor::from_slice(&tape.device(), shape, values).unwrap()).unwrap()
}

fn mask(tape: &Tape, shape: &[usize], values: &[bool]) -> Var {
    tape.constant(&Tensor::from_slice(&tape.device(), shape, values).unwrap()).unwrap()
}

fn seen(y: Result<Var>) -> (Vec<usize>, Vec<f64>) {
    let y = y.unwrap();
    (y.shape().to_vec(), y.tensor().unwrap().to_f64_vec().unwrap())
}

fn refused(y: Result<Var>, words: &str) {
    let error = y.unwrap_err().to_string();
    assert!(error.contains(words), "`{error}` doesn't say `{words}`");
}

fn slice(start: impl Into<Option<isize>>, stop: impl Into<Option<isize>>, step: isize) -> Index<'static> {
    Index::Slice { start: start.into(), stop: stop.into(), step }
}

#[test]
fn index_expressions() {
    let tape = Tape::new(&retape_cpu::device());
    let x = counting(&tape, &[3, 4]);
    assert_eq!(seen(x.clone().index(&[Index::At(-1)])), (vec![4], vec![8.0, 9.0, 10.0, 11.0]));
    assert_eq!(seen(x.clone().index(&[Index::At(1), slice(None, None, 3)])), (vec![2], vec![4.0, 7.0]));
    assert_eq!(seen(x.clone().index(&[Index::Ellipsis, slice(-2, 9, 1)])).1, [2.0, 3.0, 6.0, 7.0, 10.0, 11.0]);
    assert_eq!(seen(x.clone().index(&[slice(2, 1, 1)])), (vec![0, 4], vec![]));
    assert_eq!(x.clone().index(&[Index::NewAxis, Index::Ellipsis, Index::NewAxis]).unwrap().shape()[..], [1, 3, 4, 1]);
    assert_eq!(
        seen(x.clone().index(&[Index::Tensor(&ids(&tape, &[2], &[2, -3])), Index::At(1)])),
        (vec![2], vec![9.0, 1.0])
    );
    let (i, j) = (ids(&tape, &[2, 1], &[0, 2]), ids(&tape, &[3], &[1, 1, -1]));
    assert_eq!(seen(x.clone().index(&[(&i).into(), (&j).into()])), (vec![2, 3], vec![1.0, 1.0, 3.0, 9.0, 9.0, 11.0]));

    // Neighbours stay in their place; indices apart go in front.
    let y = counting(&tape, &[2, 3, 4]);
    let pick = ids(&tape, &[5], &[0; 5]);
    let all = || slice(None, None, 1);
    assert_eq!(y.clone().index(&[all(), (&pick).into(), (&pick).into()]).unwrap().shape()[..], [2, 5]);
    assert_eq!(y.index(&[(&pick).into(), all(), (&pick).into()]).unwrap().shape()[..], [5, 3]);

    // A mask over two dimensions, one over the last, and a scalar one.
    let truths: Vec<bool> = (0..12).map(|i| i % 5 == 0).collect();
    assert_eq!(seen(x.clone().index(&[(&mask(&tape, &[3, 4], &truths)).into()])), (vec![3], vec![0.0, 5.0, 10.0]));
    let columns = mask(&tape, &[4], &[false, true, false, true]);
    assert_eq!(seen(x.clone().index(&[Index::Ellipsis, (&columns).into()])).1, [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]);
    assert_eq!(x.clone().index(&[(&mask(&tape, &[], &[true])).into()]).unwrap().shape()[..], [1, 3, 4]);
    assert_eq!(x.clone().index(&[(&mask(&tape, &[], &[false])).into()]).unwrap().shape()[..], [0, 3, 4]);

    refused(x.clone().index(&[Index::At(3)]), "outside dimension 0 of size 3");
    refused(x.clone().index(&[Index::At(0), Index::At(0), Index::At(0)]), "more indices than the 2 dimensions");
    refused(x.clone().index(&[Index::Ellipsis, Index::Ellipsis]), "at most one ellipsis");
    refused(x.clone().index(&[slice(None, None, -1)]), "needs 1 or more");
    refused(x.clone().index(&[(&ids(&tape, &[1], &[-4])).into()]), "allowed are -3..3");
    refused(x.clone().index(&[(&mask(&tape, &[2], &[true, true])).into()]), "the mask [2]");
    refused(x.clone().index(&[(&x).into()]), "must be i64 or i32");
    refused(x.index(&[(&i).into(), (&ids(&tape, &[3, 2], &[0; 6])).into()]), "don't broadcast");
}

/// What is taken several times gets the sum of its gradients, in the order of the index.
#[test]
fn gradients_of_indices() {
    let tape = Tape::new(&retape_cpu::device());
    let x = counting(&tape, &[3, 2]);
    let y = x.clone().index(&[(&ids(&tape, &[4], &[1, -1, 1, 1])).into()]).unwrap();
    let g = floats(&tape.device(), &[4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], DType::F64);
    let gradients = tape.backward_from(&[(&y, &g)], BackwardOptions::default()).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_f64_vec().unwrap(), [0.0, 0.0, 13.0, 16.0, 3.0, 4.0]);
}

#[test]
fn shapes_with_a_size_left_open() {
    let tape = Tape::new(&retape_cpu::device());
    let x = counting(&tape, &[2, 6]);
    assert_eq!(x.clone().reshape(&[3, -1]).unwrap().shape()[..], [3, 4]);
    assert_eq!(x.clone().expand(&[5, -1, -1]).unwrap().shape()[..], [5, 2, 6]);
    assert_eq!(x.clone().permute(&[-1, 0]).unwrap().shape()[..], [6, 2]);
    refused(x.clone().reshape(&[-1, -1]), "one size may be -1");
    refused(x.clone().reshape(&[5, -1]), "no size for the -1");
    refused(x.clone().reshape(&[-2, 6]), "0 or more");
    refused(x.clone().expand(&[-1, 2, 6]), "new dimensions need one");
    refused(x.clone().permute(&[0, 0]), "not an order");
    refused(x.clone().narrow(0, -3, 1), "allowed are a start in -2..=2");
    refused(x.clone().narrow(1, 5, 2), "not inside");
    refused(x.clone().narrow(1, 0, -1), "0 or more elements");
    refused(x.clone().squeeze_dims(&[0, -2]), "named twice");
    refused(x.clone().unsqueeze(4), "goes to -3..=2");
    refused(x.clone().flatten(1, 0), "comes after");
    refused(x.clone().roll_dims(&[1, 2], &[0]), "one shift for each dimension");
    refused(x.clone().flip(&[0, 0]), "each once");
    refused(x.clone().repeat(&[2]), "fewer dimensions");
    refused(x.clone().pad(&[1], 0.0), "two widths");
    refused(x.clone().pad(&[-4, -3], 0.0), "cut away more");
    refused(x.clone().select(0, 2).and_then(|x| x.tril(0)), "outside dimension 0");
    refused(x.clone().reshape(&[12]).unwrap().glu(0).unwrap().reshape(&[3, 2]).unwrap().glu(0), "an even size");
    assert!(x.clone().split_every(0, 0).is_err() && x.clone().chunk(0, 0).is_err() && x.split(1, &[2, 3]).is_err());
}

#[test]
fn products_that_don_t_fit() {
    let tape = Tape::new(&retape_cpu::device());
    let (a, v) = (counting(&tape, &[2, 3]), counting(&tape, &[3]));
    refused(a.clone().mm(&v), "needs [m, k] and [k, n]");
    refused(a.clone().bmm(&a), "needs [batch, m, k] and [batch, k, n]");
    refused(a.clone().matmul(&a), "the inner sizes differ");
    refused(v.clone().matmul(&a), "the inner sizes differ");
    refused(a.clone().dot(&v), "two vectors");
    refused(
        v.clone().addmm(a.clone(), a.clone().transpose(0, 1).unwrap(), 1.0, 1.0),
        "can't be broadcast to the product",
    );
    refused(a.select(0, 0).unwrap().select(0, 0).unwrap().matmul(&v), "at least two dimensions");
}

#[test]
fn indices_out_of_range_are_refused_and_masks_need_numbers() {
    let tape = Tape::new(&retape_cpu::device());
    let x = counting(&tape, &[3, 2]);
    let bad = ids(&tape, &[1], &[3]);
    refused(x.clone().index_select(0, &bad), "allowed are 0..3");
    refused(x.clone().index_select(0, ids(&tape, &[1], &[-1])), "allowed are 0..3");
    refused(x.clone().index_add(0, &bad, counting(&tape, &[1, 2]), 1.0), "allowed are 0..3");
    refused(x.clone().index_add(0, &bad, counting(&tape, &[2, 2]), 1.0), "the source must be [1, 2]");
    refused(x.clone().gather(0, &bad), "the input's rank 2");
    refused(x.clone().gather(1, ids(&tape, &[4, 1], &[0; 4])), "where the input has only 3");
    refused(x.clone().gather(0, &x), "must be i64 or i32");
    refused(x.embedding_padded(&bad, 5), "outside the table of 3 rows");

    let tape = Tape::new(&meta());
    let x = counting(&tape, &[3]);
    let error = x.clone().index(&[(&mask(&tape, &[3], &[true; 3])).into()]).unwrap_err();
    assert!(matches!(error, Error::NoNumbers { .. }), "{error}");
    assert_eq!(x.index_select(0, ids(&tape, &[2], &[0, 9])).unwrap().shape()[..], [2]);
}

//! Sizes, counts, dimensions and options at their extremes, through every call that takes one: an error, or a result of
//! the same shape on the CPU and dry, with a gradient. Nothing wraps, and nothing asks for memory that isn't there.

use super::cpu;
use proptest::prelude::*;
use retape_core::kernel::{self, PoolDivisor, RandomStream};
use retape_core::ops::attention::AttentionOptions;
use retape_core::ops::conv::{Conv, Padding};
use retape_core::ops::index::Index;
use retape_core::ops::pool::Pool;
use retape_core::{
    BackwardOptions, DType, Device, Error, Int8Spec, Mark, MemoryKind, Result, Rounding, Tape, TapeOptions, Tensor,
    Var, meta,
};
use retape_tests::choices::{Bytes, Choices};
use retape_tests::random;

const SIZES: [usize; 16] = [
    1,
    0,
    2,
    3,
    4,
    5,
    7,
    64,
    usize::MAX,
    usize::MAX - 1,
    1 << 63,
    (1 << 63) + 1,
    (1 << 63) - 1,
    1 << 62,
    1 << 32,
    1 << 31,
];
const NUMBERS: [isize; 17] = [
    0,
    1,
    -1,
    2,
    -2,
    3,
    -3,
    4,
    64,
    isize::MIN,
    isize::MIN + 1,
    isize::MAX,
    isize::MAX - 1,
    1 << 62,
    -(1 << 62),
    1 << 32,
    -(1 << 31),
];

/// What a call is made with.
struct Draw<'a> {
    choices: &'a mut dyn FnMut(usize) -> usize,
}

impl Draw<'_> {
    fn size(&mut self) -> usize {
        SIZES[(self.choices)(SIZES.len())]
    }
    /// Mostly ordinary, so that the extreme ones get past the checks of the others.
    fn mostly(&mut self, usual: usize) -> usize {
        if (self.choices)(3) == 2 { self.size() } else { usual }
    }
    fn number(&mut self) -> isize {
        NUMBERS[(self.choices)(NUMBERS.len())]
    }
    fn dim(&mut self) -> isize {
        if (self.choices)(3) == 2 { self.number() } else { (self.choices)(5) as isize - 2 }
    }
    fn few<T>(&mut self, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let n = (self.choices)(4);
        (0..n).map(|_| one(self)).collect()
    }
    fn float(&mut self) -> f64 {
        [0.5, 0.0, 1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MAX, f64::MIN_POSITIVE]
            [(self.choices)(9)]
    }
    fn flag(&mut self) -> bool {
        (self.choices)(2) == 1
    }
}

type Call = fn(&Values, &mut Draw<'_>) -> Result<Vec<Var>>;

/// What calls are made on.
struct Values {
    x: Var,
    vector: Var,
    scalar: Var,
    images: Var,
    weight: Var,
    ids: Var,
    four: Var,
    empty: Var,
}

impl Values {
    fn new(tape: &Tape) -> Result<Values> {
        let device = tape.device();
        let leaf = |shape: &[usize], seed| tape.leaf(&random(&device, shape, seed, DType::F32));
        Ok(Values {
            x: leaf(&[3, 4], 1)?,
            vector: leaf(&[4], 2)?,
            scalar: leaf(&[], 3)?,
            images: leaf(&[2, 4, 5, 6], 4)?,
            weight: leaf(&[4, 2, 3, 2], 5)?,
            ids: tape.constant(&Tensor::from_slice(&device, &[3], &[0i64, 2, 1])?)?,
            four: leaf(&[1, 4, 2, 4], 6)?,
            empty: leaf(&[0, 4], 7)?,
        })
    }
    fn any(&self, d: &mut Draw<'_>) -> &Var {
        [&self.x, &self.vector, &self.scalar, &self.images, &self.empty][(d.choices)(5)]
    }
}

fn one(y: Result<Var>) -> Result<Vec<Var>> {
    y.map(|y| vec![y])
}

fn pool(d: &mut Draw<'_>) -> Pool {
    Pool {
        kernel: [d.mostly(2), d.mostly(2)],
        stride: [d.mostly(1), d.mostly(2)],
        padding: [d.mostly(0), d.mostly(1)],
        dilation: [d.mostly(1), d.mostly(1)],
        ceil: d.flag(),
    }
}

const CALLS: &[(&str, Call)] = &[
    ("reshape", |v, d| one(v.any(d).clone().reshape(&d.few(Draw::number)))),
    ("reshape by sizes", |v, d| one(v.any(d).clone().reshape(&d.few(Draw::size)))),
    ("permute", |v, d| one(v.any(d).clone().permute(&d.few(Draw::dim)))),
    ("transpose", |v, d| one(v.any(d).clone().transpose(d.dim(), d.dim()))),
    ("expand", |v, d| one(v.any(d).clone().expand(&d.few(Draw::number)))),
    ("expand by sizes", |v, d| one(v.any(d).clone().expand(&d.few(Draw::size)))),
    ("narrow", |v, d| one(v.any(d).clone().narrow(d.dim(), d.number(), d.size()))),
    ("narrow_at", |v, d| {
        let device = v.x.tape().device();
        let start = Tensor::from_slice(&device, &[], &[d.number() as i64])?;
        one(v.any(d).clone().narrow_at(d.dim(), &v.x.tape().constant(&start)?, d.number()))
    }),
    ("split", |v, d| v.any(d).clone().split(d.dim(), &d.few(Draw::size))),
    ("split_every", |v, d| v.any(d).clone().split_every(d.dim(), d.size())),
    ("split_every of much", |v, d| v.scalar.clone().expand(&[d.size()])?.split_every(0, d.size())),
    ("chunk", |v, d| v.any(d).clone().chunk(d.size(), d.dim())),
    ("chunk of much", |v, d| v.scalar.clone().expand(&[d.size()])?.chunk(d.size(), 0)),
    ("unbind", |v, d| v.any(d).clone().unbind(d.dim())),
    ("unbind of much", |v, d| v.scalar.clone().expand(&[d.size()])?.unbind(0)),
    ("squeeze_dims", |v, d| one(v.any(d).clone().squeeze_dims(&d.few(Draw::dim)))),
    ("unsqueeze", |v, d| one(v.any(d).clone().unsqueeze(d.dim()))),
    ("select", |v, d| one(v.any(d).clone().select(d.dim(), d.number()))),
    ("flatten", |v, d| one(v.any(d).clone().flatten(d.dim(), d.dim()))),
    ("pad", |v, d| one(v.any(d).clone().pad(&d.few(|d| d.number()), d.float()))),
    ("pad by pairs", |v, d| one(v.x.clone().pad(&[d.number(), d.number(), d.dim(), d.dim()], d.float()))),
    ("repeat", |v, d| one(v.any(d).clone().repeat(&d.few(Draw::number)))),
    ("repeat by sizes", |v, d| one(v.any(d).clone().repeat(&d.few(Draw::size)))),
    ("roll", |v, d| one(v.any(d).clone().roll(d.number()))),
    ("roll_dims", |v, d| {
        let dims = d.few(Draw::dim);
        let shifts: Vec<isize> = dims.iter().map(|_| d.number()).collect();
        one(v.any(d).clone().roll_dims(&shifts, &dims))
    }),
    ("flip", |v, d| one(v.any(d).clone().flip(&d.few(Draw::dim)))),
    ("tril", |v, d| one(v.any(d).clone().tril(d.number()))),
    ("triu", |v, d| one(v.any(d).clone().triu(d.number()))),
    ("cat", |v, d| one(v.any(d).clone().cat([v.any(d).clone()], d.dim()))),
    ("cat of much", |v, d| {
        let much = v.scalar.clone().expand(&[d.size()])?;
        one(much.clone().cat([much.clone(), much.clone()], d.dim()))
    }),
    ("stack", |v, d| one(Var::stack([v.x.clone(), v.x.clone()], d.dim()))),
    ("group_norm", |v, d| one(v.any(d).clone().group_norm(d.size(), None, None, d.float()))),
    ("layer_norm_over", |v, d| one(v.any(d).clone().layer_norm_over(&d.few(Draw::size), None, None, d.float()))),
    ("cumsum", |v, d| one(v.any(d).clone().cumsum(d.dim()))),
    ("cumprod", |v, d| one(v.any(d).clone().cumprod(d.dim()))),
    ("softmax_dim", |v, d| one(v.any(d).clone().softmax_dim(d.dim()))),
    ("log_softmax", |v, d| one(v.any(d).clone().log_softmax(d.dim()))),
    ("glu", |v, d| one(v.any(d).clone().glu(d.dim()))),
    ("sum_dims", |v, d| one(v.any(d).clone().sum_dims(&d.few(Draw::dim), d.flag()))),
    ("var", |v, d| one(v.any(d).clone().var(&d.few(Draw::dim), d.float(), d.flag()))),
    ("vector_norm", |v, d| one(v.any(d).clone().vector_norm(d.float(), &d.few(Draw::dim), d.flag()))),
    ("normalize", |v, d| one(v.any(d).clone().normalize(d.float(), d.dim(), d.float()))),
    ("max_dim", |v, d| v.any(d).clone().max_dim(d.dim(), d.flag()).map(|(y, at)| vec![y, at])),
    ("clamp", |v, d| one(v.any(d).clone().clamp(d.float(), d.float()))),
    ("dropout", |v, d| one(v.any(d).clone().dropout(d.float()))),
    ("gather", |v, d| one(v.any(d).clone().gather(d.dim(), &v.ids))),
    ("index_select", |v, d| one(v.any(d).clone().index_select(d.dim(), &v.ids))),
    ("take_along_dim", |v, d| one(v.any(d).clone().take_along_dim(&v.ids, d.flag().then(|| d.dim())))),
    ("scatter_add", |v, d| one(v.vector.clone().scatter_add(d.dim(), &v.ids, v.any(d)))),
    ("index_add", |v, d| one(v.x.clone().index_add(d.dim(), &v.ids, v.any(d), d.float()))),
    ("embedding_padded", |v, d| one(v.any(d).clone().embedding_padded(&v.ids, d.dim()))),
    ("index", |v, d| {
        let place = |d: &mut Draw<'_>| match (d.choices)(3) {
            0 => Index::At(d.number()),
            1 => {
                let (start, stop) = (d.flag().then(|| d.number()), d.flag().then(|| d.number()));
                Index::Slice { start, stop, step: d.number() }
            }
            _ => Index::NewAxis,
        };
        one(v.any(d).clone().index(&d.few(place)))
    }),
    ("cross_entropy", |v, d| one(v.x.clone().cross_entropy(&v.ids, d.number() as i64))),
    ("conv2d", |v, d| {
        let padding = if d.flag() { Padding::Zeros([d.mostly(0), d.mostly(1)]) } else { Padding::Same };
        let (stride, dilation) = ([d.mostly(1), d.mostly(1)], [d.mostly(1), d.mostly(2)]);
        let groups = d.mostly(2);
        one(v.images.clone().conv2d(&v.weight, None, Conv { stride, padding, dilation, groups }))
    }),
    ("conv1d", |v, d| {
        let x = v.images.clone().select(2, 0)?;
        let weight = v.weight.clone().select(2, 0)?;
        let padding = if d.flag() { Padding::Zeros([d.mostly(0)]) } else { Padding::Same };
        one(x.conv1d(
            &weight,
            None,
            Conv { stride: [d.mostly(1)], padding, dilation: [d.mostly(1)], groups: d.mostly(2) },
        ))
    }),
    ("conv2d of a large kernel", |v, d| {
        let weight = v.scalar.clone().expand(&[1, 4, d.mostly(2), d.mostly(2)])?;
        let padding = Padding::Zeros([d.mostly(1), d.mostly(1)]);
        one(v.images.clone().conv2d(&weight, None, Conv { padding, ..Conv::default() }))
    }),
    ("max_pool2d", |v, d| one(v.images.clone().max_pool2d(pool(d)))),
    ("max_pool2d_with_indices", |v, d| v.images.clone().max_pool2d_with_indices(pool(d)).map(|(y, at)| vec![y, at])),
    ("avg_pool2d", |v, d| {
        let fixed = [1, 0, -1, i64::MIN, i64::MAX][(d.choices)(5)];
        let divisor = [PoolDivisor::Inside, PoolDivisor::Padded, PoolDivisor::Fixed(fixed)][(d.choices)(3)];
        one(v.images.clone().avg_pool2d(pool(d), divisor))
    }),
    ("attention_ragged", |v, d| {
        let q = v.four.clone().select(0, 0)?;
        one(q.clone().attention_ragged(
            &q,
            &q,
            &d.few(|d| d.mostly(4)),
            &d.few(|d| d.mostly(4)),
            AttentionOptions::default(),
        ))
    }),
    ("scaled_dot_product_attention of many", |v, d| {
        let q = v.scalar.clone().expand(&[d.size(), 1, 1, 2, 4])?;
        let k = v.scalar.clone().expand(&[1, d.size(), 1, 2, 4])?;
        one(q.scaled_dot_product_attention(
            &k,
            &k,
            None,
            AttentionOptions { scale: Some(d.float()), ..Default::default() },
        ))
    }),
    ("matmul of many", |v, d| {
        let a = v.scalar.clone().expand(&[d.size(), 1, 2, 3])?;
        one(a.matmul(&v.scalar.clone().expand(&[1, d.size(), 3, d.mostly(2)])?))
    }),
    ("add of much", |v, d| {
        one(v.scalar.clone().expand(&[d.size(), 1])?.add(&v.scalar.clone().expand(&[1, d.size()])?))
    }),
    ("contiguous of much", |v, d| one(v.scalar.clone().expand(&d.few(Draw::size))?.contiguous())),
    ("cast of much", |v, d| one(v.scalar.clone().expand(&d.few(Draw::size))?.cast(DType::F64))),
    ("marks", |v, d| {
        let y = v.x.clone().scale(2.0)?;
        let marks: Vec<Mark> = Mark::all().collect();
        y.set_mark(match marks[(d.choices)(marks.len())] {
            Mark::Int8(_) => Mark::Int8(Int8Spec {
                group: d.size(),
                rounding: if d.flag() { Rounding::Stochastic } else { Rounding::Nearest },
            }),
            other => other,
        })?;
        one(y.square())
    }),
    ("a cast of a mark's", |v, d| {
        let y = v.scalar.clone().expand(&d.few(Draw::size))?.cast(DType::F64)?;
        y.set_mark(Mark::FORMATS[(d.choices)(Mark::FORMATS.len())])?;
        one(y.square())
    }),
    ("tensor", |v, d| {
        let device = v.x.tape().device();
        let dtype = DType::ALL[(d.choices)(DType::ALL.len())];
        let t = match (d.choices)(4) {
            0 => Tensor::uninit(&device, &d.few(Draw::size), dtype, MemoryKind::Input)?,
            1 => Tensor::full(&device, &d.few(Draw::size), dtype, d.float())?,
            2 => Tensor::from_slice(&device, &d.few(Draw::size), &[1f32, 2.0])?,
            _ => Tensor::from_bytes(&device, &d.few(Draw::size), dtype, &[0; 8])?,
        };
        one(v.x.tape().constant(&t))
    }),
    ("views of a tensor", |v, d| {
        let mut t = v.x.tensor()?;
        for _ in 0..(d.choices)(5) {
            t = match (d.choices)(7) {
                0 => t.narrow(d.mostly(0), d.size(), d.size())?,
                1 => t.slice(d.mostly(0), d.size(), d.size(), d.size())?,
                2 => t.as_strided(&d.few(Draw::size), &d.few(Draw::size), d.size())?,
                3 => t.expand(&d.few(Draw::size))?,
                4 => t.permute(&d.few(Draw::size))?,
                5 => t.transpose(d.size(), d.size())?,
                _ => t.view_as(&d.few(Draw::size))?.unwrap_or(t),
            };
        }
        one(v.x.tape().constant(&t))
    }),
];

/// Memory that the CPU may take: more is an error there, and dry there is none.
const LIMIT: u64 = 64 << 20;

/// The shapes that a call gives and the numbers of its gradients, or its error.
fn outcome(device: &Device, call: Call, bytes: &[u8]) -> Result<Vec<Vec<usize>>> {
    let mut choices = Bytes::new(bytes);
    let tape = Tape::with(device, TapeOptions { seed: Some(1), ..TapeOptions::default() });
    let values = Values::new(&tape)?;
    let y = call(&values, &mut Draw { choices: &mut |sides| choices.throw(sides) })?;
    let shapes = y.iter().map(|y| y.shape().to_vec()).collect();
    let is_small = |y: &&Var| y.shape().iter().fold(1usize, |n, &size| n.saturating_mul(size)) < 10_000;
    for y in y.iter().filter(is_small).filter(|y| y.requires_grad()).take(3) {
        tape.backward_with(&y.clone().sum()?, BackwardOptions::RETAIN)?;
    }
    Ok(shapes)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn extremes_are_errors_or_results(bytes in prop::collection::vec(any::<u8>(), 40)) {
        for &(name, call) in CALLS {
            let device = cpu();
            device.meter().set_limit(Some(LIMIT));
            let (real, dry) = (outcome(&device, call, &bytes), outcome(&meta(), call, &bytes));
            prop_assert_eq!(device.meter().live(), 0, "{}", name);
            match (&real, &dry) {
                (Err(Error::OutOfMemory { .. }), _) | (Err(_), Err(_)) => {}
                // What only the numbers show.
                (Err(Error::InvalidInput { .. } | Error::NonFinite { .. }), Ok(_)) => {}
                (_, Err(Error::NoNumbers { .. })) => {}
                _ => prop_assert_eq!(real, dry, "{}", name),
            }
        }
    }
}

/// What was found by hand, each with what it must say.
#[test]
fn extremes_say_what_is_right() {
    let tape = Tape::new(&meta());
    let v = Values::new(&tape).unwrap();
    let wide = Pool { kernel: [(1 << 63) + 1, 1], ..Pool::new([1, 1]) };
    let dilated = Conv { dilation: [1 << 63, 1], groups: 2, ..Conv::default() };
    let errors = [
        ("no parts", v.x.clone().chunk(0, 0).err(), "at least one chunk"),
        ("parts of nothing", v.empty.chunk(usize::MAX, 0).err(), "at most 1048576"),
        ("many parts", v.scalar.expand(&[1usize << 40]).unwrap().split_every(0, 1).err(), "at most 1048576"),
        ("a wide pool", v.images.clone().max_pool2d(wide).err(), "reaches further"),
        ("a dilated kernel", v.images.clone().conv2d(&v.weight, None, dilated).err(), "doesn't fit"),
        ("no groups", v.images.clone().group_norm(0, None, None, 1e-5).err(), "equal groups"),
        ("far padding", v.x.clone().pad(&[isize::MAX, isize::MAX], 0.0).err(), "63 bits"),
        ("many repeats", v.x.clone().repeat(&[usize::MAX, 2]).err(), "63 bits"),
        ("a huge tensor", Tensor::uninit(&meta(), &[1 << 61], DType::F64, MemoryKind::Input).err(), "64 bits"),
    ];
    for (what, error, words) in errors {
        let text = error.unwrap_or_else(|| panic!("{what} is no error")).to_string();
        assert!(text.contains(words), "{what}: {text}");
    }
    let error = retape_cpu::device_with_threads(usize::MAX).unwrap_err().to_string();
    assert!(error.contains("at most 4096"), "{error}");
    assert_eq!(v.x.clone().chunk(usize::MAX, 0).unwrap().len(), 3);
    assert_eq!(v.x.split_every(0, usize::MAX).unwrap().len(), 1);
    // A stride and a step longer than all there is give one place.
    let far = Pool { stride: [usize::MAX, usize::MAX], ceil: true, ..Pool::new([2, 2]) };
    assert_eq!(v.images.max_pool2d(far).unwrap().shape()[2..], [1, 1]);
}

/// A dry run may count all the memory that there is, and no more.
#[test]
fn a_dry_run_counts_in_64_bits() {
    let device = meta();
    let much: Vec<Tensor> =
        (0..2).map(|_| Tensor::uninit(&device, &[(1 << 63) - 1], DType::U8, MemoryKind::Input).unwrap()).collect();
    let more = Tensor::uninit(&device, &[(1 << 63) - 1], DType::U8, MemoryKind::Input);
    assert!(matches!(more, Err(Error::OutOfMemory { .. })), "{more:?}");
    drop(much);
    assert_eq!(device.meter().live(), 0);
    let out = Tensor::uninit(&device, &[2], DType::F32, MemoryKind::Input).unwrap();
    device.run(kernel::Uniform { stream: RandomStream { seed: u64::MAX, counter: u64::MAX }, out: &out }).unwrap();
}

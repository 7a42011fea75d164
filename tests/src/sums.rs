//! Sums of very many equal addends, against their closed form: an error that grows with their number shows here.

use retape_core::kernel::{self, CrossEntropySpec, LossReduction, PoolDivisor};
use retape_core::ops::pool::Pool;
use retape_core::{DType, Device, Result, Tape, Tensor, Var};

/// A sum: what it is, what came of it, and what is right.
#[derive(Debug, Clone)]
pub struct Found {
    /// Which op, and of what.
    pub name: &'static str,
    /// The result.
    pub got: f64,
    /// The closed form.
    pub want: f64,
}

impl Found {
    /// The relative error; of what should be 0, the error.
    pub fn error(&self) -> f64 {
        (self.got - self.want).abs() / if self.want == 0.0 { 1.0 } else { self.want.abs() }
    }
}

/// The addend, close to 0.01, such that f16 holds the sum of 4 million of them.
const ADDEND: f64 = 0.01;

/// One dtype on one device.
struct Sums<'a> {
    device: &'a Device,
    dtype: DType,
    n: usize,
    /// The addend as the dtype holds it.
    v: f64,
    found: Vec<Found>,
}

impl Sums<'_> {
    fn full(&self, shape: &[usize], value: f64) -> Result<Tensor> {
        Tensor::full(self.device, shape, self.dtype, value)
    }

    /// v, -v, v, .. along the first dimension.
    fn alternating(&self, tape: &Tape, rest: &[usize]) -> Result<Var> {
        let [plus, minus] = [self.v, -self.v].map(|v| self.full(&[&[1], rest].concat(), v));
        let pair = tape.constant(&plus?)?.cat([tape.constant(&minus?)?.clone()], 0)?;
        let repeats: Vec<usize> = std::iter::once(self.n / 2).chain(rest.iter().map(|_| 1)).collect();
        pair.repeat(&repeats)
    }

    fn zeros(&self, tape: &Tape, shape: &[usize]) -> Result<Var> {
        tape.constant(&Tensor::full(self.device, shape, DType::I64, 0.0)?)
    }

    /// Notes the largest deviation of a result whose elements are all to be `want`.
    fn is(&mut self, name: &'static str, got: &Tensor, want: f64) -> Result<()> {
        let distance = |v: &f64| (v - want).abs();
        let values = got.to_f64_vec()?;
        let got = values.into_iter().max_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(f64::NAN);
        self.found.push(Found { name, got, want });
        Ok(())
    }

    fn last(&mut self, name: &'static str, y: &Var, want: f64) -> Result<()> {
        let y = y.tensor()?;
        let y = (0..y.rank()).try_fold(y, |y, d| y.narrow(d, y.shape()[d] - 1, 1))?;
        self.is(name, &y, want)
    }

    fn reductions(&mut self) -> Result<()> {
        let (n, v) = (self.n, self.v);
        let count = n as f64;
        let tape = &Tape::new(self.device);
        let row = tape.constant(&self.full(&[n], v)?)?;
        self.is("sum of a row", &row.clone().sum()?.tensor()?, count * v)?;
        self.is("mean of a row", &row.clone().mean()?.tensor()?, v)?;
        self.is("norm 1", &row.clone().vector_norm(1.0, &[], false)?.tensor()?, count * v)?;
        self.is("norm 2", &row.clone().vector_norm(2.0, &[], false)?.tensor()?, count.sqrt() * v)?;
        self.is("norm 3", &row.clone().vector_norm(3.0, &[], false)?.tensor()?, count.powf(1.0 / 3.0) * v)?;
        self.is("logsumexp", &row.clone().logsumexp(&[], false)?.tensor()?, v + count.ln())?;
        self.is("softmax", &row.clone().softmax()?.tensor()?, 1.0 / count)?;
        self.is("log_softmax", &row.clone().log_softmax(0)?.tensor()?, -count.ln())?;
        self.last("cumsum", &row.clone().cumsum(0)?, count * v)?;
        let columns = tape.constant(&self.full(&[n, 3], v)?)?;
        self.is("sum of columns", &columns.clone().sum_dims(&[0], false)?.tensor()?, count * v)?;
        self.is("mean of all", &columns.clone().mean()?.tensor()?, v)?;
        self.is("sum of strided rows", &columns.clone().transpose(0, 1)?.sum_dims(&[1], false)?.tensor()?, count * v)?;
        let wide = tape.constant(&self.full(&[n / 64, 64], v)?)?;
        self.is("sum of many columns", &wide.clone().sum_dims(&[0], false)?.tensor()?, (n / 64) as f64 * v)?;
        drop((row, columns, wide));
        let either = self.alternating(tape, &[])?;
        self.is("variance", &either.clone().var(&[], 1.0, false)?.tensor()?, v * v * count / (count - 1.0))?;
        self.is("deviation", &either.clone().std(&[], 0.0, false)?.tensor()?, v)?;
        self.last("layer_norm", &either.clone().layer_norm(None, None, 0.0)?, -1.0)?;
        self.last("rms_norm", &either.rms_norm(&[n], None, Some(0.0))?, -1.0)?;
        let square = (n as f64).sqrt() as usize;
        let image = tape.constant(&self.full(&[1, 1, square, square], v)?)?;
        let pool = Pool { kernel: [square; 2], stride: [square; 2], padding: [0; 2], dilation: [1; 2], ceil: false };
        self.is("avg_pool", &image.avg_pool2d(pool, PoolDivisor::Inside)?.tensor()?, v)?;
        if self.dtype == DType::F32 {
            // 1 + 2^-20, so that the product is about 45.
            let near = 1.0 + 2f64.powi(-20);
            let row = tape.constant(&self.full(&[n], near)?)?;
            self.is("product", &row.clone().prod(&[], false)?.tensor()?, near.powf(count))?;
            self.last("cumprod", &row.cumprod(0)?, near.powf(count))?;
        }
        let squares = Tensor::full(self.device, &[], DType::F64, 0.0)?;
        self.device.run(kernel::SquaredNorm { x: &self.full(&[n], v)?, out: &squares })?;
        self.is("squared norm", &squares, count * v * v)
    }

    /// Backward of the sum of y times the addend: notes the gradient of the leaf.
    fn gradient(
        &mut self,
        name: &'static str,
        leaf: &[usize],
        want: f64,
        y: impl Fn(&Self, &Var) -> Result<Var>,
    ) -> Result<()> {
        let tape = Tape::new(self.device);
        let x = tape.leaf(&self.full(leaf, 0.0)?)?;
        // The gradient of y is the addend, repeated.
        let loss = y(self, &x)?.scale(self.v)?.sum()?;
        let gradients = tape.backward(&loss)?;
        let gradient = gradients.of(&x).expect("the leaf is used").clone();
        self.is(name, &gradient, want)
    }

    fn gradients(&mut self) -> Result<()> {
        let (n, v) = (self.n, self.v);
        let (sum, few) = (n as f64 * v, n / 64);
        self.gradient("broadcast", &[1, 3], sum, |s, x| x.clone().expand(&[s.n, 3]))?;
        self.gradient("embedding", &[1, 1], sum, |s, x| x.clone().embedding(&s.zeros(x.tape(), &[s.n])?))?;
        self.gradient("embedding, wide", &[1, 64], few as f64 * v, |s, x| {
            x.clone().embedding(&s.zeros(x.tape(), &[few])?)
        })?;
        self.gradient("index_select", &[1, 2], sum, |s, x| x.clone().index_select(0, &s.zeros(x.tape(), &[s.n])?))?;
        self.gradient("gather", &[1], sum, |s, x| x.clone().gather(0, &s.zeros(x.tape(), &[s.n])?))?;
        self.gradient("gather in columns", &[1, 2], sum / 2.0, |s, x| {
            x.clone().gather(0, &s.zeros(x.tape(), &[s.n / 2, 2])?)
        })?;
        self.gradient("index", &[1], sum, |s, x| x.clone().index(&[(&s.zeros(x.tape(), &[s.n])?).into()]))?;
        self.gradient("layer_norm's bias", &[2], sum, |s, x| {
            let rows = x.tape().constant(&s.full(&[s.n, 2], 0.0)?)?;
            let weight = x.tape().constant(&s.full(&[2], 1.0)?)?;
            rows.layer_norm(Some(weight.clone()), Some(x.clone()), 1.0)
        })?;
        self.gradient("rms_norm's weight", &[2], sum, |s, x| {
            x.tape().constant(&s.full(&[s.n, 2], s.v)?)?.rms_norm(&[2], Some(x.clone()), Some(0.0))
        })?;
        self.gradient("group_norm's bias", &[1], sum, |s, x| {
            let images = x.tape().constant(&s.full(&[s.n / 4, 1, 4], 0.0)?)?;
            let weight = x.tape().constant(&s.full(&[1], 1.0)?)?;
            images.group_norm(1, Some(weight.clone()), Some(x.clone()), 1.0)
        })?;
        let tape = Tape::new(self.device);
        let (zeros, addends) = (self.zeros(&tape, &[n])?, tape.constant(&self.full(&[n], v)?)?);
        let start = tape.constant(&self.full(&[2], 0.0)?)?;
        self.is("scatter_add", &start.clone().scatter_add(0, &zeros, &addends)?.tensor()?.narrow(0, 0, 1)?, sum)?;
        self.is("index_add", &start.index_add(0, &zeros, &addends, 0.5)?.tensor()?.narrow(0, 0, 1)?, 0.5 * sum)?;
        let one = tape.constant(&self.full(&[2], n as f64 * v)?)?;
        self.is("scatter_add to a sum", &one.scatter_add(0, &zeros, &addends)?.tensor()?.narrow(0, 0, 1)?, 2.0 * sum)
    }

    fn losses(&mut self) -> Result<()> {
        let (n, v) = (self.n, self.v);
        let tape = &Tape::new(self.device);
        let (logits, target) = (tape.constant(&self.full(&[n, 2], 0.0)?)?, self.zeros(tape, &[n])?);
        let spec = |reduction| CrossEntropySpec { reduction, ..CrossEntropySpec::default() };
        let loss = |spec| logits.cross_entropy_with(&target, None, 1, spec);
        let ln2 = std::f64::consts::LN_2;
        self.is("cross_entropy, mean", &loss.clone()(spec(LossReduction::Mean))?.tensor()?, ln2)?;
        if self.dtype != DType::F16 {
            self.is("cross_entropy, sum", &loss(spec(LossReduction::Sum))?.tensor()?, n as f64 * ln2)?;
        }
        let likely = tape.constant(&self.full(&[n, 1], -v)?)?;
        let nll = likely.nll_loss(&target, None, 1, spec(LossReduction::Sum))?;
        self.is("nll_loss, sum", &nll.tensor()?, n as f64 * v)?;
        let flat = tape.constant(&self.full(&[1, n], v)?)?;
        let one = self.zeros(tape, &[1])?;
        self.is("cross_entropy of a long row", &flat.cross_entropy(&one, -1)?.tensor()?, (n as f64).ln())
    }

    /// A block of k is summed in f32 by the library's kernel, and k is cut into such blocks.
    fn products(&mut self) -> Result<()> {
        let (n, v) = (self.n, self.v);
        let tape = &Tape::new(self.device);
        let ones = tape.constant(&self.full(&[n, 2], 1.0)?)?;
        let row = tape.constant(&self.full(&[1, n], v)?)?;
        self.is("matmul", &row.matmul(&ones)?.tensor()?, n as f64 * v)?;
        self.gradient("linear's weight", &[1, 2], n as f64 * v, |s, x| {
            x.tape().constant(&s.full(&[s.n, 1], 1.0)?)?.linear(x, None)
        })
    }
}

/// Sums of `n` equal addends by reductions, gathers' gradients, scatters and losses, in a dtype.
pub fn of_equal_addends(device: &Device, dtype: DType, n: usize) -> Result<Vec<Found>> {
    let v = Tensor::full(device, &[], dtype, ADDEND)?.to_f64_vec()?[0];
    let mut sums = Sums { device, dtype, n, v, found: Vec::new() };
    sums.reductions()?;
    sums.gradients()?;
    sums.losses()?;
    Ok(sums.found)
}

/// The same of matrix products.
pub fn of_products(device: &Device, dtype: DType, n: usize) -> Result<Vec<Found>> {
    let v = Tensor::full(device, &[], dtype, ADDEND)?.to_f64_vec()?[0];
    let mut sums = Sums { device, dtype, n, v, found: Vec::new() };
    sums.products()?;
    Ok(sums.found)
}

/// Fails where a sum is further from its closed form than half a unit of the dtype and `tolerance`.
pub fn assert_close(dtype: DType, found: &[Found], tolerance: f64) {
    let half_unit = match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 0.0,
    };
    // What is smaller than a normal number of f16 (a softmax of millions) has fewer digits.
    let allowed =
        |f: &Found| tolerance + half_unit.max(if dtype == DType::F16 { 2f64.powi(-25) / f.want.abs() } else { 0.0 });
    let wrong: Vec<String> = found
        .iter()
        .filter(|f| f.error().is_nan() || f.error() > allowed(f))
        .map(|f| format!("{dtype} {}: {} for {} ({:.1e} off)", f.name, f.got, f.want, f.error()))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

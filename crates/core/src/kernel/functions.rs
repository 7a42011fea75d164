//! The functions of the elementwise kernels.

/// Elementwise functions of one argument, each with its derivative (written with x, and y = f(x)).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum UnaryFn {
    /// -x; derivative -1.
    Neg,
    /// c x; derivative c.
    Scale(f64),
    /// x + c; derivative 1.
    Shift(f64),
    /// e^x; derivative y.
    Exp,
    /// ln x; derivative 1/x.
    Log,
    /// Square root; derivative 1/(2y).
    Sqrt,
    /// 1/sqrt(x); derivative -y^3/2.
    Rsqrt,
    /// 1/x; derivative -y^2.
    Reciprocal,
    /// x^2; derivative 2x.
    Square,
    /// |x|; derivative sign(x), 0 at 0 and NaN.
    Abs,
    /// tanh x; derivative 1 - y^2.
    Tanh,
    /// 1/(1+e^-x); derivative y(1-y).
    Sigmoid,
    /// max(x, 0); derivative 1 where x > 0, 0 at 0. NaN passes through, with derivative 1.
    Relu,
    /// x sigmoid(x); derivative s + x s (1-s) with s = sigmoid(x).
    Silu,
    /// GELU with erf: x Phi(x); derivative Phi(x) + x phi(x). (Hendrycks and Gimpel 2016.)
    Gelu,
    /// GELU with tanh: x/2 (1 + tanh(sqrt(2/pi)(x + 0.044715 x^3))). (The same paper; GPT-2's form.)
    GeluTanh,
    /// sin x; derivative cos x.
    Sin,
    /// cos x; derivative -sin x.
    Cos,
    /// ln(1 + x), exact near 0; derivative 1/(1+x).
    Log1p,
    /// e^x - 1, exact near 0; derivative y + 1.
    Expm1,
    /// The error function; derivative 2/sqrt(pi) e^(-x^2).
    Erf,
    /// ln(1 + e^(beta x)) / beta, without overflow, and x itself where beta x > threshold; derivative sigmoid(beta x),
    /// there 1.
    Softplus {
        /// Steepness.
        beta: f64,
        /// Where the function goes over into x.
        threshold: f64,
    },
    /// ln sigmoid(x); derivative sigmoid(-x).
    LogSigmoid,
    /// x where x > 0, else c x; derivative 1 or c (c at 0).
    LeakyRelu(f64),
    /// x where x > 0, else alpha (e^x - 1); derivative 1 or alpha e^x (NaN at NaN).
    Elu(f64),
    /// Limited to [low, high], high where low > high; derivative 0 at a bound and outside, else 1. An infinite bound is
    /// none. NaN passes through, with derivative 1: it is at no bound, and outside none.
    Clamp {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
    /// x^c; derivative c x^(c-1), 0 where c = 0.
    Pow(f64),
    /// c^x; derivative y ln c, 0 where c = 0 and x >= 0.
    PowBase(f64),
}

/// Elementwise functions of two arguments of one shape (broadcasting is done by stride-0 views).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum BinaryFn {
    /// a + b
    Add,
    /// a - b
    Sub,
    /// a b
    Mul,
    /// a / b
    Div,
    /// The larger; NaN if either is NaN.
    Maximum,
    /// The smaller; NaN if either is NaN.
    Minimum,
    /// a^b
    Pow,
}

/// Elementwise functions of three arguments of one shape.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum TernaryFn {
    /// a + c (b - a), written as b - (1 - c)(b - a) where |c| >= 1/2: exact at both ends. The difference is taken of halves:
    /// it doesn't overflow.
    Lerp,
    /// a + value b c
    Addcmul(f64),
    /// a + value b / c
    Addcdiv(f64),
    /// Gradient of a^b by a: c b a^(b-1), 0 where b = 0.
    PowGradBase,
    /// Gradient of a^b by b: c a^b ln a, 0 where a = 0 and b >= 0.
    PowGradExponent,
    /// Gradient of a/b by b: -c (a/b) / b, the quotient first.
    DivGradDivisor,
}

impl UnaryFn {
    /// True where the derivative is computed from the output y rather than the input x.
    pub const fn grad_reads_output(self) -> bool {
        use UnaryFn::*;
        matches!(self, Exp | Expm1 | PowBase(_) | Sqrt | Rsqrt | Reciprocal | Tanh | Sigmoid)
    }
    /// True where the derivative is a constant: nothing is saved.
    pub const fn is_affine(self) -> bool {
        matches!(self, UnaryFn::Neg | UnaryFn::Scale(_) | UnaryFn::Shift(_))
    }
}

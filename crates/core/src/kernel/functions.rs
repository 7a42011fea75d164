//! Elementwise functions, each a row of a table. Of the rows everything is made that names, lists or describes
//! functions.
//!
//! ```text
//! /// What the method of `Var` does.
//! method: Variant(parameters) => { formula: "..", derivative: "..", saves: x, domain: REALS, .. }
//! ```
//!
//! - The method's name is the op's, too. A row's place is the function's number in kernels/elementwise.cu.
//! - `saves`, for functions of one number: `x` where the derivative is computed from x, `y` where from the output,
//!   `nothing` where it is constant.
//! - `domain`: between which numbers tests run the function, a range for each argument.
//! - `kinks`: where the function isn't smooth. Finite differences stay away from there.
//! - `constants`: the two numbers that kernels get, where they aren't the parameters themselves.
//! - `examples`: parameters that tests take, held by every dtype. The first is for all samples of the op.

use std::ops::Range;

/// Where functions of all numbers are tested.
const REALS: Range<f64> = -2.0..2.0;
/// Where functions of numbers above 0 are tested.
const POSITIVE: Range<f64> = 0.3..3.0;

/// Hands the table of functions of one number to the macro `$make`.
macro_rules! unary_functions {
    ($make:ident) => { $make! {
        /// Elementwise functions of one argument, each with its derivative (written with x, and y = f(x)).
        #[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
        UnaryFn of Range<f64>:

        /// -x, elementwise, like all in this list.
        neg: Neg => { formula: "-x", derivative: "-1", saves: nothing, domain: REALS }
        /// c x.
        scale: Scale(c: f64) => {
            formula: "c x", derivative: "c", saves: nothing, domain: REALS, examples: [Scale(-1.5)]
        }
        /// x + c.
        shift: Shift(c: f64) => {
            formula: "x + c", derivative: "1", saves: nothing, domain: REALS, examples: [Shift(0.75)]
        }
        /// e^x.
        exp: Exp => { formula: "e^x", derivative: "y", saves: y, domain: REALS }
        /// Natural logarithm.
        log: Log => { formula: "ln x", derivative: "1/x", saves: x, domain: POSITIVE }
        /// Square root.
        sqrt: Sqrt => { formula: "sqrt(x)", derivative: "1/(2y)", saves: y, domain: POSITIVE }
        /// 1 / sqrt(x).
        rsqrt: Rsqrt => { formula: "1 / sqrt(x)", derivative: "-y^3/2", saves: y, domain: POSITIVE }
        /// 1 / x.
        reciprocal: Reciprocal => { formula: "1 / x", derivative: "-y^2", saves: y, domain: POSITIVE }
        /// x^2.
        square: Square => { formula: "x^2", derivative: "2x", saves: x, domain: REALS }
        /// |x|; the gradient at 0 is 0.
        abs: Abs => {
            formula: "|x|", derivative: "sign(x), 0 at 0 and NaN", saves: x, domain: REALS, kinks: [0.0]
        }
        /// Hyperbolic tangent.
        tanh: Tanh => { formula: "tanh(x)", derivative: "1 - y^2", saves: y, domain: REALS }
        /// 1 / (1 + e^-x).
        sigmoid: Sigmoid => { formula: "1 / (1 + e^-x)", derivative: "y(1-y)", saves: y, domain: REALS }
        /// max(x, 0); the gradient at 0 is 0.
        relu: Relu => {
            formula: "max(x, 0)",
            derivative: "1 where x > 0, 0 at 0. NaN passes through, with derivative 1",
            saves: x, domain: REALS, kinks: [0.0]
        }
        /// x sigmoid(x).
        silu: Silu => {
            formula: "x sigmoid(x)", derivative: "s + x s (1-s) with s = sigmoid(x)", saves: x, domain: REALS
        }
        /// GELU, exact: x Phi(x).
        gelu: Gelu => {
            formula: "x Phi(x)",
            derivative: "Phi(x) + x phi(x). This is GELU with erf (Hendrycks and Gimpel 2016)",
            saves: x, domain: REALS
        }
        /// GELU in its tanh form, as GPT-2 uses it.
        gelu_tanh: GeluTanh => {
            formula: "0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))",
            derivative: "s + x s (1-s) 2u' with s = sigmoid(2u) and tanh of u. This is GELU with tanh (the same paper)",
            saves: x, domain: REALS
        }
        /// Sine.
        sin: Sin => { formula: "sin(x)", derivative: "cos x", saves: x, domain: REALS }
        /// Cosine.
        cos: Cos => { formula: "cos(x)", derivative: "-sin x", saves: x, domain: REALS }
        /// ln(1 + x), exact near 0.
        log1p: Log1p => { formula: "ln(1 + x)", derivative: "1/(1+x)", saves: x, domain: POSITIVE }
        /// e^x - 1, exact near 0.
        expm1: Expm1 => { formula: "e^x - 1", derivative: "y + 1", saves: y, domain: REALS }
        /// The error function.
        erf: Erf => { formula: "erf(x)", derivative: "2/sqrt(pi) e^(-x^2)", saves: x, domain: REALS }
        /// ln(1 + e^(beta x)) / beta, and x itself where beta x > threshold (usually 1 and 20).
        softplus: Softplus {
            /// Steepness.
            beta: f64,
            /// Where the function goes over into x.
            threshold: f64,
        } => {
            formula: "ln(1 + e^(beta x)) / beta, x past the threshold",
            derivative: "sigmoid(beta x), there 1: where beta x > threshold. Nothing overflows",
            saves: x, domain: REALS,
            examples: [
                Softplus { beta: 1.5, threshold: 20.0 },
                Softplus { beta: 1.0, threshold: 20.0 },
                Softplus { beta: 1.5, threshold: 1.0 },
                Softplus { beta: 1.5, threshold: 1e4 },
                Softplus { beta: -0.5, threshold: f64::INFINITY }
            ]
        }
        /// ln sigmoid(x), without overflow.
        logsigmoid: LogSigmoid => {
            formula: "-ln(1 + e^-x)", derivative: "sigmoid(-x)", saves: x, domain: REALS
        }
        /// x where x > 0, else `slope` x (usually 0.01); the gradient at 0 is the slope.
        leaky_relu: LeakyRelu(slope: f64) => {
            formula: "x where x > 0, else slope x", derivative: "1 or the slope (that at 0)",
            saves: x, domain: REALS, kinks: [0.0], examples: [LeakyRelu(0.125)]
        }
        /// x where x > 0, else alpha (e^x - 1) (alpha usually 1); the gradient at NaN is NaN.
        elu: Elu(alpha: f64) => {
            formula: "x where x > 0, else alpha (e^x - 1)", derivative: "1 or alpha e^x (NaN at NaN)",
            saves: x, domain: REALS, kinks: [0.0], examples: [Elu(0.75)]
        }
        /// x limited to [low, high]; an infinite bound is none. The gradient at a bound is 0, NaN passes it.
        clamp: Clamp {
            /// Lower bound.
            low: f64,
            /// Upper bound.
            high: f64,
        } => {
            formula: "min(max(x, low), high)",
            derivative: "0 at a bound and outside, else 1. The function is high where low > high, and an infinite \
                bound is none. NaN passes through, with derivative 1: it is at no bound, and outside none",
            saves: x, domain: REALS, kinks: [low, high],
            examples: [
                Clamp { low: -1.0, high: 0.75 },
                Clamp { low: -0.5, high: 2.0 },
                Clamp { low: f64::NEG_INFINITY, high: 1.0 },
                Clamp { low: 0.0, high: f64::INFINITY }
            ]
        }
        /// x^c.
        pow_scalar: Pow(c: f64) => {
            formula: "x^c", derivative: "c x^(c-1), 0 where c = 0", saves: x, domain: POSITIVE,
            constants: [c, c - 1.0],
            examples: [Pow(2.5), Pow(0.0), Pow(1.0), Pow(2.0), Pow(3.0), Pow(0.5), Pow(-1.0)]
        }
        /// base^x.
        scalar_pow: PowBase(base: f64) => {
            formula: "base^x", derivative: "y ln base, 0 where the base is 0 and x >= 0", saves: y, domain: REALS,
            constants: [base, base.ln()],
            examples: [PowBase(1.5), PowBase(0.0), PowBase(0.5), PowBase(2.0)]
        }
    } };
}

/// Hands the table of functions of two numbers to the macro `$make`.
macro_rules! binary_functions {
    ($make:ident) => {
        $make! {
            /// Elementwise functions of two arguments of one shape (broadcasting is done by stride-0 views).
            #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
            BinaryFn of [Range<f64>; 2]:

            /// a + b with broadcasting, like all in this list. Backward reads nothing.
            add: Add => { formula: "a + b", domain: APART }
            /// a - b. Backward reads nothing.
            sub: Sub => { formula: "a - b", domain: APART }
            /// a b. Backward reads each factor whose partner needs a gradient.
            mul: Mul => { formula: "a b", domain: APART }
            /// a / b. Backward reads b, and a if b needs a gradient.
            div: Div => { formula: "a / b", domain: APART }
            /// The larger of a and b; on a tie each gets half the gradient. Backward reads both.
            maximum: Maximum => { formula: "max(a, b)", note: "NaN if either is NaN", domain: APART }
            /// The smaller of a and b; on a tie each gets half the gradient. Backward reads both.
            minimum: Minimum => { formula: "min(a, b)", note: "NaN if either is NaN", domain: APART }
            /// a^b. Backward reads both.
            pow: Pow => { formula: "a^b", domain: [0.4..2.0, -1.0..1.0] }
        }
    };
}

/// The second away from 0, so that quotients stay tame.
const APART: [Range<f64>; 2] = [-1.0..1.0, 0.4..2.0];

/// Hands the table of functions of three numbers to the macro `$make`. Their methods are in ops/ternary.rs; those named
/// `grad` have none, as they are parts of gradients.
macro_rules! ternary_functions {
    ($make:ident) => { $make! {
        /// Elementwise functions of three arguments of one shape.
        #[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
        TernaryFn of [Range<f64>; 3]:

        lerp: Lerp => {
            formula: "a + c (b - a)",
            note: "Written as b - (1 - c)(b - a) where |c| >= 1/2: exact at both ends. The difference is taken of \
                halves: it doesn't overflow",
            domain: TAME
        }
        addcmul: Addcmul(value: f64) => { formula: "a + v b c", domain: TAME, examples: [Addcmul(1.5)] }
        addcdiv: Addcdiv(value: f64) => { formula: "a + v b / c", domain: TAME, examples: [Addcdiv(-0.5)] }
        pow_grad: PowGradBase => {
            formula: "a gradient of a^b, by a or by b", note: "By a: c b a^(b-1), 0 where b = 0", domain: TAME
        }
        pow_grad: PowGradExponent => {
            formula: "a gradient of a^b, by a or by b", note: "By b: c a^b ln a, 0 where a = 0 and b >= 0", domain: TAME
        }
        div_grad: DivGradDivisor => {
            formula: "the gradient of a / b by b", note: "-c (a/b) / b, the quotient first", domain: TAME
        }
    } };
}

/// The third away from 0.
const TAME: [Range<f64>; 3] = [-1.0..1.0, -1.0..1.0, 0.4..2.0];

/// The first, where it is there, else the second.
macro_rules! either {
    ([] $default:expr) => {
        $default
    };
    ([$given:expr] $default:expr) => {
        $given
    };
}

/// The enum of a table, with what every table says.
macro_rules! functions {
    (
        $(#[$about:meta])*
        $enum:ident of $domains:ty:
        $(
            $(#[$does:meta])*
            $method:ident: $variant:ident
                $(( $($arg:ident: $type:ty),+ ))?
                $({ $($(#[$says:meta])* $field:ident: $field_type:ty,)+ })?
            => {
                formula: $formula:literal
                $(, derivative: $derivative:literal, saves: $saves:ident)?
                $(, note: $note:literal)?
                , domain: $domain:expr
                $(, kinks: [$($kink:expr),+])?
                $(, constants: $constants:expr)?
                $(, examples: [$($example:expr),+])?
            }
        )+
    ) => {
        $(#[$about])*
        pub enum $enum {
            $(
                #[doc = concat!($formula $(, "; derivative ", $derivative)? $(, ". ", $note)?, ".")]
                $variant $(($($type),+))? $({ $($(#[$says])* $field: $field_type),+ })?,
            )+
        }

        impl $enum {
            /// Every function in the table's order, each with one or several examples of its parameters.
            pub const ALL: &'static [&'static [$enum]] = {
                use $enum::*;
                &[$(either!([$(&[$($example),+])?] &[$variant])),+]
            };
            /// The names of the variants, in the same order.
            pub const VARIANTS: &'static [&'static str] = &[$(stringify!($variant)),+];

            /// The name of the op.
            pub const fn name(self) -> &'static str {
                match self {
                    $($enum::$variant { .. } => stringify!($method),)+
                }
            }
            /// What it computes, in the words of the table in `docs/ops.md`.
            pub const fn formula(self) -> &'static str {
                match self {
                    $($enum::$variant { .. } => $formula,)+
                }
            }
            /// Its place in the table, and its number in kernels of other devices.
            pub const fn number(self) -> i32 {
                enum Place {
                    $($variant),+
                }
                match self {
                    $($enum::$variant { .. } => Place::$variant as i32,)+
                }
            }
            /// The numbers that go with [`number`](Self::number): the parameters, or what is computed from them.
            pub fn constants(self) -> [f64; 2] {
                match self {
                    $($enum::$variant $(($($arg),+))? $({ $($field),+ })? => either!(
                        [$($constants)?]
                        two(&[$($($arg),+)? $($($field),+)?])
                    ),)+
                }
            }
            /// Between which numbers tests run it.
            pub const fn domain(self) -> $domains {
                match self {
                    $($enum::$variant { .. } => $domain,)+
                }
            }
        }
    };
}

/// What the table of functions of one number says beside.
macro_rules! derivatives {
    (
        $(#[$about:meta])*
        $enum:ident of $domains:ty:
        $(
            $(#[$does:meta])*
            $method:ident: $variant:ident
                $(( $($arg:ident: $type:ty),+ ))?
                $({ $($(#[$says:meta])* $field:ident: $field_type:ty,)+ })?
            => {
                formula: $formula:literal, derivative: $derivative:literal, saves: $saves:ident, domain: $domain:expr
                $(, kinks: [$($kink:expr),+])?
                $(, constants: $constants:expr)?
                $(, examples: [$($example:expr),+])?
            }
        )+
    ) => {
        impl $enum {
            const fn saves(self) -> Saved {
                use Saved::*;
                match self {
                    $($enum::$variant { .. } => $saves,)+
                }
            }
            /// Where it isn't smooth, within its domain.
            #[allow(unused_variables)] // most functions have no kinks that depend on their parameters
            pub fn kinks(self) -> Vec<f64> {
                match self {
                    $($enum::$variant $(($($arg),+))? $({ $($field),+ })? => vec![$($($kink),+)?],)+
                }
            }
        }
    };
}

unary_functions!(functions);
unary_functions!(derivatives);
binary_functions!(functions);
ternary_functions!(functions);
pub(crate) use {binary_functions, unary_functions};

/// What the gradient of a function of one number reads.
#[allow(non_camel_case_types)] // as the table writes them
enum Saved {
    x,
    y,
    nothing,
}

impl UnaryFn {
    /// True where the derivative is computed from the output y rather than the input x.
    pub const fn grad_reads_output(self) -> bool {
        matches!(self.saves(), Saved::y)
    }
    /// True where the derivative is a constant: nothing is saved.
    pub const fn is_affine(self) -> bool {
        matches!(self.saves(), Saved::nothing)
    }
    /// The parts of its domain between kinks, a little away from them.
    pub fn smooth(self) -> Vec<Range<f64>> {
        const MARGIN: f64 = 0.1;
        let Range { start, end } = self.domain();
        let within = |kink: &f64| start < *kink && *kink < end;
        let kinks: Vec<f64> = self.kinks().into_iter().filter(within).collect();
        let starts = kinks.iter().map(|kink| kink + MARGIN);
        let ends = kinks.iter().map(|kink| kink - MARGIN);
        [start].into_iter().chain(starts).zip(ends.chain([end])).map(|(start, end)| start..end).collect()
    }
}

const fn two(parameters: &[f64]) -> [f64; 2] {
    match *parameters {
        [] => [0.0, 0.0],
        [first] => [first, 0.0],
        [first, second, ..] => [first, second],
    }
}

//! Random programs with random marks, handles and scopes: the engine against itself.

use crate::{gradient_bytes, lossy_marks, random};
use retape_core::kernel::{self, RandomStream, UnaryFn};
use retape_core::ops::*;
use retape_core::{
    BackwardOptions, DType, Decision, Device, Error, Mark, Origin, Policy, Result, RuleInfo, Site, Stats, Tape,
    TapeOptions, Tensor, Var, Verify, meta,
};
use std::rc::Rc;

/// An op with two outputs that backward both reads: sin and cos.
#[derive(Debug, Clone, Copy)]
pub struct SinCos;

impl OpRule for SinCos {
    fn name(&self) -> &'static str {
        "sin_cos"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        let output = Output::new(inputs[0].shape.clone(), inputs[0].dtype);
        Ok([output.clone(), output].into_iter().collect())
    }
    fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
        exec.run(kernel::Unary { f: UnaryFn::Sin, x: &x[0], out: &out[0] })?;
        exec.run(kernel::Unary { f: UnaryFn::Cos, x: &x[0], out: &out[1] })
    }
    fn saves(&self, _: &[bool]) -> Saves {
        saves([Slot::Out(0), Slot::Out(1)])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        use retape_core::kernel::BinaryFn;
        // d sin = cos, d cos = -sin.
        let exec = cx.exec(0);
        let (gs, gc) = (cx.grad(0), cx.grad(1));
        let (s, c) = (cx.saved(Slot::Out(0))?, cx.saved(Slot::Out(1))?);
        let sum = exec.empty_like(cx.input(0))?;
        exec.run(kernel::Fill { value: 0.0, out: &sum })?;
        for (f, g, factor) in [(BinaryFn::Add, gs, &c), (BinaryFn::Sub, gc, &s)] {
            if let Some(g) = g {
                let term = exec.empty_like(cx.input(0))?;
                exec.run(kernel::Binary { f: BinaryFn::Mul, a: &g, b: factor, out: &term })?;
                exec.run(kernel::Binary { f, a: &sum, b: &term, out: &sum })?;
            }
        }
        cx.set(0, sum);
        Ok(())
    }
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(2, inputs, outputs)
    }
    fn samples() -> Vec<Sample> {
        vec![]
    }
}

/// Random numbers that are a pure function of a seed and a counter.
#[derive(Debug, Clone, Copy)]
pub struct Dice {
    seed: u64,
    throws: u64,
}

impl Dice {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Dice {
        Dice { seed, throws: 0 }
    }
    /// 0 .. sides - 1.
    pub fn throw(&mut self, sides: usize) -> usize {
        self.throws += 1;
        (RandomStream { seed: self.seed, counter: 0xd1ce }.word(self.throws) as u64 * sides as u64).wrapping_shr(32)
            as usize
    }
}

/// Marks by a hash of the path: a pure function of the site, with all marks about equally often.
#[derive(Debug)]
pub struct RandomMarks {
    seed: u64,
    lossy: Vec<Mark>,
    rules: Vec<RuleInfo>,
}

impl RandomMarks {
    /// Marks none, keep, recompute and (with `lossy`) those that may lose bits.
    pub fn new(seed: u64, lossy: bool) -> RandomMarks {
        let lossy = if lossy { lossy_marks() } else { Vec::new() };
        RandomMarks { seed, lossy, rules: vec![RuleInfo { name: "random".into(), origin: Origin::Preset }] }
    }
}

impl Policy for RandomMarks {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let hash =
            site.path.bytes().fold(self.seed, |h, b| (h ^ b as u64).wrapping_mul(0x100_0000_01b3).rotate_left(9));
        let mark = match Dice::new(hash ^ site.output as u64).throw(3 + self.lossy.len()) {
            0 => return None,
            1 => Mark::Keep,
            2 => Mark::Recompute,
            lossy => self.lossy[lossy - 3],
        };
        Some(Decision { mark, rule: 0 })
    }
    fn rules(&self) -> &[RuleInfo] {
        &self.rules
    }
}

#[derive(Debug, Clone)]
enum Step {
    UnaryFn(&'static str, usize),
    BinaryFn(&'static str, usize, usize),
    LayerNorm(usize),
    Reshaped(usize),
    Dropout(usize),
    Split(usize),
    /// Rows of a value, some of them twice.
    Rows(usize),
    /// A column of a value, repeated.
    Column(usize),
    SinCos(usize),
}

/// A random straight-line program on 8 x 8 matrices.
fn program(seed: u64) -> Vec<Step> {
    let mut dice = Dice::new(seed ^ 0xabc);
    let steps = 8 + dice.throw(40);
    let local = dice.throw(2) == 0;
    let mut values = LEAVES;
    let mut program = Vec::new();
    for _ in 0..steps {
        let pick = |dice: &mut Dice| {
            if local && values > LEAVES + 4 { values - 1 - dice.throw(5) } else { dice.throw(values) }
        };
        let (a, b) = (pick(&mut dice), pick(&mut dice));
        let step = match dice.throw(16) {
            0 | 1 => Step::BinaryFn("add", a, b),
            2 => Step::BinaryFn("mul", a, b),
            3 => Step::UnaryFn("scale", a),
            4 | 5 => Step::BinaryFn("matmul", a, b),
            6 => Step::UnaryFn("gelu", a),
            7 => Step::UnaryFn("softmax", a),
            8 => Step::LayerNorm(a),
            9 => Step::UnaryFn("transpose", a),
            10 => Step::Reshaped(a),
            11 => Step::Dropout(a),
            12 => Step::Split(a),
            13 => Step::Rows(a),
            14 => Step::Column(a),
            _ => Step::SinCos(a),
        };
        values += if matches!(step, Step::SinCos(_)) { 2 } else { 1 };
        program.push(step);
    }
    program
}

const LEAVES: usize = 3;

/// How to run a program.
#[derive(Debug, Clone, Copy, Default)]
pub struct Config {
    /// Which program.
    pub graph: u64,
    /// Random marks by this seed; none without.
    pub marks: Option<u64>,
    /// Whether those that may lose bits are among them, and among the late ones.
    pub lossy: bool,
    /// Handles held at random by this seed; 0: released as early as possible.
    pub handles: u64,
    /// Marks set late at random by this seed; 0: none.
    pub late: u64,
    /// In bf16 instead of f64.
    pub half: bool,
    /// Every six steps lie in a scope that is a segment.
    pub segments: bool,
    /// Audit replays.
    pub verify: bool,
    /// Backward passes, all but the last retained.
    pub passes: usize,
}

/// What a run gave.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Gradients by pass and leaf, as bytes.
    pub gradients: Vec<Vec<Vec<u8>>>,
    /// Highest step bytes.
    pub peak: u64,
    /// Hash of all memory events.
    pub fingerprint: u64,
    /// Bytes saved when forward ended.
    pub saved: u64,
    /// Meter's saved and quantized bytes at that moment, by kind.
    pub metered: u64,
    /// Live bytes after a forward whose loss was dropped, the tape being alive.
    pub left_without_backward: u64,
    /// Nodes then (the leaves).
    pub nodes_without_backward: usize,
    /// Live bytes at the end.
    pub left: u64,
    /// Late marks that came too late.
    pub too_late: usize,
    /// Counters.
    pub stats: Stats,
}

/// A program's tensors, which its user holds during a step: its leaves, and the weight of its norms.
pub fn tensors(device: &Device) -> Vec<Tensor> {
    let leaves = (0..LEAVES as u64).map(|i| random(device, &[8, 8], i + 1, DType::F64));
    leaves.chain([random(device, &[8], 7, DType::F64)]).collect()
}

/// Runs a program forward on a tape: the loss, and its leaves with a gradient.
pub fn forward(tape: &Tape, tensors: &[Tensor], config: Config) -> Result<(Var, Vec<Var>)> {
    let leaf = |i: usize| if i + 1 == LEAVES { tape.constant(&tensors[i]) } else { tape.leaf(&tensors[i]) };
    let leaves: Vec<Var> = (0..LEAVES).map(leaf).collect::<Result<_>>()?;
    let weight = leaf(LEAVES)?;
    let (loss, _) = build(tape, &program(config.graph), &leaves, &weight, config, &mut 0)?;
    let with_gradient = leaves.into_iter().chain([weight]).filter(Var::requires_grad).collect();
    Ok((loss, with_gradient))
}

/// Runs a program forward (twice: once to drop the loss) and backward.
pub fn run(device: &Device, config: Config) -> Result<Run> {
    use retape_core::MemoryKind;
    let program = program(config.graph);
    let dtype = if config.half { DType::BF16 } else { DType::F64 };
    let leaves: Vec<Tensor> = (0..LEAVES as u64).map(|i| random(device, &[8, 8], i + 1, dtype)).collect();
    let weight = random(device, &[8], 7, dtype);
    let base = device.meter().live();
    device.meter().reset_peak();
    let mut out = Run::default();
    {
        let policy = config.marks.map(|seed| Rc::new(RandomMarks::new(seed, config.lossy)) as Rc<dyn Policy>);
        let verify = if config.verify { Verify::Bits } else { Verify::Off };
        let tape =
            Tape::with(device, TapeOptions { policy, verify, seed: Some(config.graph), ..TapeOptions::default() });
        // The last leaf needs no gradient.
        let vars: Vec<Var> = leaves
            .iter()
            .enumerate()
            .map(|(i, t)| if i + 1 < LEAVES { tape.leaf(t) } else { tape.constant(t) })
            .collect::<Result<_>>()?;
        let weight = tape.leaf(&weight)?;
        let (loss, held) = build(&tape, &program, &vars, &weight, config, &mut out.too_late)?;
        drop((loss, held));
        out.left_without_backward = device.meter().live() - base;
        out.nodes_without_backward = tape.node_count();
        let (loss, held) = build(&tape, &program, &vars, &weight, config, &mut out.too_late)?;
        out.saved = tape.saved_bytes();
        out.metered = device.meter().live_of(MemoryKind::Saved) + device.meter().live_of(MemoryKind::Quantized);
        for pass in 0..config.passes {
            let gradients = tape.backward_from(
                &[(&loss, &Tensor::full(device, &[], dtype, 1.0)?)],
                BackwardOptions { retain_graph: pass + 1 < config.passes, ..BackwardOptions::default() },
            )?;
            if device.computes() {
                let all: Vec<Var> = vars.iter().chain([&weight]).cloned().collect();
                out.gradients.push(gradient_bytes(&gradients, &all)?);
            }
        }
        out.stats = tape.stats();
        drop((loss, held));
    }
    out.peak = device.meter().step_peak();
    out.fingerprint = device.meter().fingerprint();
    out.left = device.meter().live() - base;
    Ok(out)
}

fn build(
    tape: &Tape,
    program: &[Step],
    leaves: &[Var],
    weight: &Var,
    config: Config,
    too_late: &mut usize,
) -> Result<(Var, Vec<Var>)> {
    let mut last_use = std::collections::HashMap::new();
    for (k, step) in program.iter().enumerate() {
        match *step {
            Step::BinaryFn(_, a, b) => {
                last_use.insert(a, k);
                last_use.insert(b, k);
            }
            Step::UnaryFn(_, a)
            | Step::LayerNorm(a)
            | Step::Reshaped(a)
            | Step::Dropout(a)
            | Step::Split(a)
            | Step::Rows(a)
            | Step::Column(a)
            | Step::SinCos(a) => {
                last_use.insert(a, k);
            }
        }
    }
    let mut values: Vec<Option<Var>> = leaves.iter().cloned().map(Some).collect();
    let (mut held_forward, mut held_backward) = (Vec::new(), Vec::new());
    let mut late = Dice::new(config.late);
    let mut handles = Dice::new(config.handles);
    let lossy = if config.lossy { lossy_marks() } else { Vec::new() };
    let mut scope = None;
    for (k, step) in program.iter().enumerate() {
        if config.segments && k % 6 == 0 {
            drop(scope.take());
            scope = Some(tape.scope(retape_core::scope(format!("s{}", k / 6)).segment()));
        }
        let at = |i: usize| values[i].as_ref().expect("released only after the last use");
        let new: Vec<Var> = match *step {
            Step::UnaryFn("scale", a) => vec![at(a).clone().scale(0.7)?],
            Step::UnaryFn("gelu", a) => vec![at(a).clone().gelu()?],
            Step::UnaryFn("softmax", a) => vec![at(a).clone().softmax()?],
            Step::UnaryFn(_, a) => vec![at(a).clone().transpose(0, 1)?],
            Step::BinaryFn("add", a, b) => vec![at(a).clone().add(at(b))?],
            Step::BinaryFn("mul", a, b) => vec![at(a).clone().mul(at(b))?],
            Step::BinaryFn(_, a, b) => vec![at(a).clone().matmul(at(b))?.scale(0.3)?],
            Step::LayerNorm(a) => vec![at(a).clone().layer_norm(Some(weight.clone()), None, 1e-5)?],
            Step::Reshaped(a) => vec![at(a).clone().reshape(&[4, 16])?.gelu()?.reshape(&[8, 8])?],
            // The random stream is the step's own, so that both forwards draw the same numbers.
            Step::Dropout(a) => {
                let stream = RandomStream { seed: config.graph, counter: k as u64 };
                vec![at(a).clone().apply(dropout::Dropout { p: 0.2, stream }, [])?]
            }
            Step::Split(a) => {
                let parts = at(a).clone().split(0, &[3, 5])?;
                vec![parts[1].clone().cat([parts[0].clone()], 0)?]
            }
            Step::Rows(a) => {
                let ids = Tensor::from_slice(&tape.device(), &[8], &[3i64, 0, 3, 7, 7, 7, 1, 6])?;
                vec![at(a).clone().embedding(&tape.constant(&ids)?)?]
            }
            Step::Column(a) => vec![at(a).clone().select(1, k % 8)?.expand(&[8, 8])?.scale(0.5)?],
            Step::SinCos(a) => at(a).clone().apply_all(Op::Custom(Rc::new(SinCos)), [])?,
        };
        values.extend(new.into_iter().map(Some));
        if config.late != 0 {
            for v in values.iter().skip(LEAVES).flatten() {
                let mark = match late.throw(40) {
                    0 => Mark::Recompute,
                    1 => Mark::Keep,
                    other => match lossy.get(other - 2) {
                        Some(&mark) => mark,
                        None => continue,
                    },
                };
                match v.set_mark(mark) {
                    Err(Error::MarkTooLate { .. }) => *too_late += 1,
                    // A view of a leaf.
                    Err(Error::MarkNotAllowed { .. }) => {}
                    other => other?,
                }
            }
        }
        let len = values.len();
        for (i, value) in values.iter_mut().enumerate().skip(LEAVES) {
            if last_use.get(&i).copied().unwrap_or(0) <= k
                && i + 4 < len
                && let Some(v) = value.take()
            {
                match if config.handles == 0 { 9 } else { handles.throw(6) } {
                    0 | 1 => held_forward.push(v),
                    2 => held_backward.push(v),
                    _ => drop(v),
                }
            }
        }
    }
    drop(scope);
    // From a leaf with a gradient, which a program may not have used.
    let mut sum = leaves[0].clone();
    for v in values.into_iter().skip(LEAVES).flatten() {
        sum = sum.add(&v)?;
    }
    drop(held_forward);
    Ok((sum.sum()?, held_backward))
}

/// Runs on the device and dry, and checks what always holds.
fn checked(device: &Device, config: Config) -> Run {
    let real = run(device, config).unwrap_or_else(|e| panic!("{config:?}: {e}"));
    let dry = run(&meta(), config).unwrap_or_else(|e| panic!("dry {config:?}: {e}"));
    assert_eq!((dry.peak, dry.fingerprint), (real.peak, real.fingerprint), "{config:?}");
    assert_eq!(real.left, 0, "{config:?}");
    assert_eq!(real.left_without_backward, 0, "{config:?}");
    assert_eq!(real.nodes_without_backward, 4, "only the leaves stay: {config:?}");
    assert_eq!(real.saved, real.metered, "{config:?}");
    if !config.segments {
        assert!(real.stats.most_replays_of_a_node <= 1, "{config:?}: {:?}", real.stats.most_replays_of_a_node);
    }
    assert!(real.gradients.iter().all(|g| *g == real.gradients[0]), "passes differ: {config:?}");
    real
}

/// Random marks, held handles, late marks and segments on random programs: the bits without them.
pub fn marks_never_show(device: &Device, cases: u64) {
    let (mut replays, mut too_late) = (0, 0);
    for graph in 1..=cases {
        let plain = checked(device, Config { graph, passes: 1, ..Config::default() });
        // Gradients of 16 bits are summed in f32 where many add up.
        let half = Config { graph, half: true, passes: 1, ..Config::default() };
        let marked = checked(device, Config { marks: Some(graph * 4), handles: graph + 3, passes: 2, ..half });
        assert_eq!(marked.gradients[0], checked(device, half).gradients[0], "{half:?}");
        for variant in 0..4 {
            let handles = variant % 2 * (graph + 1);
            let late = variant / 2 * (graph + 9);
            let config =
                Config { graph, marks: Some(graph * 4 + variant), handles, late, passes: 1, ..Config::default() };
            for config in [config, Config { passes: 3, ..config }, Config { segments: true, verify: true, ..config }] {
                let marked = checked(device, config);
                assert_eq!(marked.gradients[0], plain.gradients[0], "{config:?}");
                replays += marked.stats.replays;
                too_late += marked.too_late;
            }
        }
    }
    assert!(replays > 20 * cases, "the marks did something: {replays} replays");
    assert!(too_late > 0 || cases < 20, "some late marks came too late");
}

/// Lossy ones among the marks: the same gradients with other handles held, and in every pass.
pub fn lossy_marks_are_steady(device: &Device, cases: u64) {
    let mut quantized = 0;
    for graph in 1..=cases {
        for segments in [false, true] {
            let config = Config {
                graph,
                marks: Some(graph + 77),
                lossy: true,
                segments,
                verify: true,
                passes: 2,
                ..Config::default()
            };
            let tidy = checked(device, config);
            let sloppy = run(device, Config { handles: graph + 5, ..config }).unwrap();
            if !segments {
                // A held handle changes which values outlive a scope, and so their path and mark.
                assert_eq!(tidy.gradients, sloppy.gradients, "{config:?}");
            }
            quantized += tidy.stats.quantized;
        }
        // Late marks fall on other values where other handles are held; passes are alike all the same.
        if graph % 4 == 0 {
            let config = Config { graph, marks: Some(graph + 78), lossy: true, late: graph + 9, ..Config::default() };
            checked(device, Config { verify: true, passes: 2, ..config });
        }
    }
    assert!(quantized > 0);
}

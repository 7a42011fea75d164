//! The command line, as `--help` shows it.

use crate::error::Failure;
use crate::policy::{PolicySpec, parse_budget, parse_error};
use clap::{Args, Parser, Subcommand, ValueEnum};
use retape::policy::{PRESETS, Rule, parse_bytes};
use retape::{DType, nn::AttentionForm, nn::GptConfig};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Tape-based autodiff with value-level marks: keep, recompute, int8 or bf16, and what each costs.
#[derive(Debug, Parser)]
#[command(
    name = "retape",
    version,
    max_term_width = 110,
    after_help = "\
Without a command: frontier, that is every preset and three budgets on model tiny with both forms of attention.

Examples:
  retape                                     the frontier of model tiny
  retape frontier --model w1 --out out       a larger one; table, and files in out/
  retape step --model w1 --policy selective  one model, one policy
  retape inspect --model gpt3-175b           its ledger, by a dry run
  retape plan --model gpt2-xl --budget 50%   the cheapest marks for half of the memory
  retape timeline --out timeline.html        memory over one step, as a page
  retape train --steps 200 --save run        train on the built-in text

Exit status: 0 done, 2 wrong usage or input, 1 anything else."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure policies against each other: memory, time, gradient error.
    #[command(after_help = help(FRONTIER.0, FRONTIER.1))]
    Frontier(FrontierArgs),
    /// Measure forward and backward of one model under a policy.
    #[command(after_help = help(STEP.0, STEP.1))]
    Step(StepArgs),
    /// Show the ledger of saved tensors, by a dry run.
    #[command(after_help = help(INSPECT.0, INSPECT.1))]
    Inspect(InspectArgs),
    /// Plan marks for a byte budget.
    #[command(after_help = help(PLAN.0, PLAN.1))]
    Plan(PlanArgs),
    /// Draw memory over one step as a page, by a dry run.
    #[command(after_help = help(TIMELINE.0, TIMELINE.1))]
    Timeline(TimelineArgs),
    /// Train on text, with checkpoints that survive a kill at any moment.
    #[command(after_help = help(TRAIN.0, TRAIN.1))]
    Train(TrainArgs),
}

impl Default for Command {
    fn default() -> Command {
        Command::Frontier(FrontierArgs::default())
    }
}

/// What is said and shown after a command's options.
type Help = (&'static str, &'static str);

const FRONTIER: Help = (
    "\
Each policy runs once per round, the order reversed every other round; figures are medians. The overhead is \
the step's CPU time (on a GPU: its time) against that of `none` with the same attention in the same round. `none` \
always runs.",
    "  retape frontier
  retape frontier --model w1 --attention flash --policies none,selective,full_per_layer --steps 7
  retape frontier --attention explicit --policies none --mark '**.softmax=int8' --json
  retape frontier --model gpt2-xl --device meta    peaks and FLOPs alone, by dry runs
  retape frontier --train-steps 50 --out out       with the loss after training, and files in out/
  retape frontier --out out --peers peers.json     with other engines' points on the page",
);

const STEP: Help = (
    "\
With several --policy, or --attention both, the steps interleave and each gets its line.
RSS is the high-water mark of a step in a fresh process, minus what was resident before it, buffers for all \
gradients included.",
    "  retape step --model w1
  retape step --model w1 --policy selective --json
  retape step --policy none --mark 'blocks.0.mlp.gelu=recompute' --by-op
  retape step --model gpt2-small --linear-bias off --tied off --steps 3",
);

const INSPECT: Help = (
    "\
With --diff, what another policy does differently: --mark is over --policy alone, so a policy can be compared \
with itself under other marks.",
    "  retape inspect
  retape inspect --policy selective --attention explicit --all
  retape inspect --model gpt3-175b --policy full_per_layer --json
  retape inspect --policy selective_ffn --diff selective
  retape inspect --policy selective --mark 'blocks.0.**=keep' --diff selective --json",
);

const TIMELINE: Help = (
    "\
One file, to be opened in a browser: what is live at each moment of forward and backward, by kind, and what it is \
that makes the peak. With --json the same as figures, on stdout.",
    "  retape timeline --out timeline.html
  retape timeline --model w1 --policy selective --out selective.html
  retape timeline --policy none --mark '**.gelu=int8' --attention explicit --json",
);

const PLAN: Help = (
    "\
A budget bounds the step's peak; parameters, gradients and optimizer state come on top. What is promised is what \
a step takes, to the byte. Int8 and bf16 are used with --max-gradient-error alone: what they add is measured on \
the device, for this model, its first parameters and its first batch.",
    "  retape plan --model gpt2-xl --budget 50%
  retape plan --model w1 --budget 64MiB --out plan.toml    then: retape step --model w1 --policy plan.toml
  retape plan --model w1 --budget 40% --max-gradient-error 0.01
  retape plan --model w1 --budget 50% --measure --save-profile here.toml    with costs measured here",
);

const TRAIN: Help = (
    "\
A checkpoint is a directory DIR/step-N that appears whole or not at all. The order of the data and the \
dropout of a step are functions of the seed and the step, so a resumed run continues with the same bits.",
    "  retape train --steps 200
  retape train --data book.txt --val chapter.txt --steps 1000 --policy selective --save run
  retape train --resume run --save run --steps 1000
  retape train --init model.safetensors --steps 10 --json",
);

/// What every command takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Common {
    /// Print JSON on stdout; progress and notes stay on stderr
    #[arg(long, global = true)]
    pub json: bool,
    /// Where to compute: cpu, cuda:0 and on, or meta (shapes and bytes, no numbers)
    #[arg(long, global = true, value_name = "DEVICE", default_value = "cpu", value_parser = parse_device)]
    pub device: DeviceKind,
    /// Threads of the CPU device [default: what the machine offers]
    #[arg(long, global = true, value_name = "N", value_parser = parse_threads, allow_negative_numbers = true)]
    pub threads: Option<u16>,
    /// Seed of parameters, data order and dropout [default: 0]
    #[arg(long, global = true, value_name = "N", value_parser = parse_whole::<u64>, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Hard limit over all tensor bytes, 512MiB or 1.5GB [default: none]
    #[arg(long, global = true, value_name = "BYTES", value_parser = parse_bytes, allow_negative_numbers = true)]
    pub memory_limit: Option<u64>,
}

/// A kind of device that this build has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Cuda(usize),
    Meta,
}

impl DeviceKind {
    /// False on meta.
    pub fn computes(self) -> bool {
        self != DeviceKind::Meta
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceKind::Cpu => f.write_str("cpu"),
            DeviceKind::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            DeviceKind::Meta => f.write_str("meta"),
        }
    }
}

fn parse_device(text: &str) -> Result<DeviceKind, String> {
    match text {
        "cpu" => Ok(DeviceKind::Cpu),
        "cuda" => Ok(DeviceKind::Cuda(0)),
        "meta" => Ok(DeviceKind::Meta),
        _ => match text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()) {
            Some(ordinal) => Ok(DeviceKind::Cuda(ordinal)),
            None => Err("there is no such device; the devices are cpu, cuda:0 (or another number) and meta".into()),
        },
    }
}

/// Which model.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// The model [default: tiny]
    #[arg(long, value_name = "NAME", value_parser = parse_model)]
    pub model: Option<String>,
    /// Blocks
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub layers: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub dim: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub heads: Option<usize>,
    /// Key and value heads, a divisor of the heads [default: the heads]
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub kv_heads: Option<usize>,
    /// Tokens per sequence
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub seq: Option<usize>,
    /// Sequences per step
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub batch: Option<usize>,
    /// Number of tokens there are
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub vocab: Option<usize>,
    /// Probability of dropping while training
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub dropout: Option<f64>,
    /// Biases of the linear maps
    #[arg(long, value_name = "on|off", value_parser = parse_switch)]
    pub linear_bias: Option<bool>,
    /// Whether the output head is the token embedding
    #[arg(long, value_name = "on|off", value_parser = parse_switch)]
    pub tied: Option<bool>,
    /// The activations' type: f32, f64, bf16 or f16; with the last two parameters stay f32
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    pub dtype: Option<DType>,
    /// Attention as one tiled op, op by op, or both [default: flash; of frontier: both]
    #[arg(long, value_name = "FORM")]
    pub attention: Option<Attention>,
}

/// Forms of attention to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Attention {
    Flash,
    Explicit,
    Both,
}

impl Attention {
    /// The forms, tiled first.
    pub fn forms(self) -> &'static [AttentionForm] {
        match self {
            Attention::Flash => &[AttentionForm::Flash],
            Attention::Explicit => &[AttentionForm::Explicit],
            Attention::Both => &[AttentionForm::Flash, AttentionForm::Explicit],
        }
    }
}

fn parse_whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "write a whole number, 0 or more, that fits in 64 bits".into())
}

fn parse_positive(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "write a whole number, 1 or more".into())
}

fn parse_threads(text: &str) -> Result<u16, String> {
    text.parse().ok().filter(|n| (1..=1024).contains(n)).ok_or_else(|| "write a whole number from 1 to 1024".into())
}

fn parse_model(text: &str) -> Result<String, String> {
    GptConfig::named(text).map(|_| text.to_owned()).map_err(|e| e.to_string())
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("write on or off".into()),
    }
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "f64" => Ok(DType::F64),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err("models have no such dtype; write f32, f64, bf16 or f16".into()),
    }
}

/// The policies of commands that measure.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Policy")]
pub struct MarkArgs {
    /// Mark the values of a path: keep, recompute, int8 or bf16; over any policy (repeatable)
    #[arg(long = "mark", value_name = "GLOB=MARK")]
    pub marks: Vec<Rule>,
}

/// A byte budget in place of a policy.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Policy")]
pub struct BudgetArgs {
    /// Plan marks whose peak fits: 512MiB, or 75% of what `none` takes
    #[arg(long, value_name = "B", value_parser = parse_budget, allow_hyphen_values = true, conflicts_with = "policy")]
    pub budget: Option<String>,
    #[command(flatten)]
    pub planning: PlanningArgs,
}

/// How budgets are planned.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Policy")]
pub struct PlanningArgs {
    /// Let a budget's plan use int8 and bf16 that add at most this relative error to the gradients; measured
    #[arg(long, value_name = "E", value_parser = parse_error, allow_negative_numbers = true)]
    pub max_gradient_error: Option<f64>,
    /// Elements per scale of a plan's int8 [default: 64]
    #[arg(long, value_name = "N", value_parser = parse_positive, allow_negative_numbers = true)]
    pub int8_group: Option<u64>,
    /// Plan with the costs and errors of this file; see `retape plan --save-profile`
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

impl PlanningArgs {
    /// Fails where there is something to plan with and nothing to plan.
    pub fn check(&self, budget: bool) -> Result<(), Failure> {
        let given = [
            ("--max-gradient-error", self.max_gradient_error.is_some()),
            ("--int8-group", self.int8_group.is_some()),
            ("--profile", self.profile.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given && !budget) {
            Some((option, _)) => Err(Failure::usage(format!("{option} is for the plan of a budget; add --budget"))),
            None => Ok(()),
        }
    }

    /// A budget as a policy.
    pub fn spec(&self, budget: &str, marks: &[Rule]) -> PolicySpec {
        let error = self.max_gradient_error.map_or(String::new(), |e| format!(":max_gradient_error={e}"));
        let group = self.int8_group.map_or(String::new(), |n| format!(":group={n}"));
        let profile = self.profile.clone();
        PolicySpec { profile, ..PolicySpec::new(&format!("budget:{budget}{error}{group}"), marks) }
    }
}

impl BudgetArgs {
    /// The budget, or else the policy of this name.
    pub fn or_policy(&self, name: Option<&str>, marks: &[Rule]) -> Result<PolicySpec, Failure> {
        let is_budget = self.budget.is_some() || name.is_some_and(|name| name.starts_with("budget:"));
        self.planning.check(is_budget)?;
        Ok(match &self.budget {
            Some(budget) => self.planning.spec(budget, marks),
            None => {
                PolicySpec { profile: self.planning.profile.clone(), ..PolicySpec::new(name.unwrap_or("none"), marks) }
            }
        })
    }
}

#[derive(Debug, Clone, Default, Args)]
pub struct FrontierArgs {
    /// Policies, separated by commas [default: all presets, and budgets of 75%, 50% and 30%]
    #[arg(long, value_name = "A,B", value_delimiter = ',', help_heading = "Policy")]
    pub policies: Vec<String>,
    /// One more policy (repeatable)
    #[arg(long = "policy", value_name = "P", help_heading = "Policy")]
    pub policy: Vec<String>,
    /// Budgets to plan for, separated by commas: 512MiB, or 75% of what `none` takes
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = parse_budget, help_heading = "Policy")]
    pub budgets: Vec<String>,
    #[command(flatten)]
    pub planning: PlanningArgs,
    #[command(flatten)]
    pub marks: MarkArgs,
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Write frontier.json, .csv, .svg and .html into this directory
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Other engines' points for frontier.html (JSON: a list of objects with engine, label, peak_bytes,
    /// overhead_percent)
    #[arg(long, value_name = "FILE.json", requires = "out")]
    pub peers: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Debug, Clone, Default, Args)]
pub struct StepArgs {
    /// The policy (repeatable: one line each) [default: none]
    #[arg(long = "policy", value_name = "P", help_heading = "Policy")]
    pub policy: Vec<String>,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub marks: MarkArgs,
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// List time and replay time per path
    #[arg(long)]
    pub by_op: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// How to measure.
#[derive(Debug, Clone, Default, Args)]
pub struct MeasureArgs {
    /// Rounds, of which medians are taken; 0 measures memory alone [default: 5, of step: 7]
    #[arg(long, value_name = "N", value_parser = parse_whole::<usize>, allow_negative_numbers = true)]
    pub steps: Option<usize>,
    /// Also train N steps under each policy and report the loss then
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_whole::<u64>,
        allow_negative_numbers = true,
        default_value_t = 0
    )]
    pub train_steps: u64,
}

#[derive(Debug, Clone, Default, Args)]
pub struct InspectArgs {
    /// The policy [default: none]
    #[arg(long = "policy", value_name = "P", help_heading = "Policy")]
    pub policy: Option<String>,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub marks: MarkArgs,
    /// Show what this policy does differently, and why
    #[arg(long, value_name = "P2", help_heading = "Policy")]
    pub diff: Option<String>,
    /// List every value; without it blocks are grouped
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Debug, Clone, Default, Args)]
pub struct TimelineArgs {
    /// The policy [default: none]
    #[arg(long = "policy", value_name = "P", help_heading = "Policy")]
    pub policy: Option<String>,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub marks: MarkArgs,
    /// Write the page to this file
    #[arg(long, value_name = "FILE.html")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// The step's peak at most: 512MiB, or 75% of what `none` takes
    #[arg(long, value_name = "B", value_parser = parse_budget, allow_hyphen_values = true)]
    pub budget: String,
    #[command(flatten)]
    pub planning: PlanningArgs,
    #[command(flatten)]
    pub marks: MarkArgs,
    /// Measure what ops cost here, instead of taking their FLOPs and bytes
    #[arg(long)]
    pub measure: bool,
    /// Write what was measured into this file, for --profile
    #[arg(long, value_name = "FILE")]
    pub save_profile: Option<PathBuf>,
    /// Write the plan as a file of rules, for --policy
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// List every value; without it blocks are grouped
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Text to train on [default: 9 tenths of the built-in text]
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Text to validate on [default: the last tenth of the built-in text; none with --data]
    #[arg(long, value_name = "FILE")]
    pub val: Option<PathBuf>,
    /// Steps of this run
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = parse_positive, allow_negative_numbers = true)]
    pub steps: u64,
    /// The policy [default: none, or the checkpoint's]
    #[arg(long = "policy", value_name = "P", help_heading = "Policy")]
    pub policy: Option<String>,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub marks: MarkArgs,
    /// Keep checkpoints in this directory
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Steps between checkpoints; one more comes at the end
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        value_parser = parse_positive,
        allow_negative_numbers = true,
        requires = "save"
    )]
    pub save_every: u64,
    /// Continue the latest checkpoint of this directory
    #[arg(long, value_name = "DIR", conflicts_with = "init")]
    pub resume: Option<PathBuf>,
    /// Start from these parameters (safetensors, GPT-2's names)
    #[arg(long, value_name = "FILE")]
    pub init: Option<PathBuf>,
    /// Steps between validations; 0: at the end only
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_whole::<u64>,
        allow_negative_numbers = true,
        default_value_t = 0
    )]
    pub val_every: u64,
    #[command(flatten)]
    pub settings: SettingArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// AdamW's settings; what is left out is the default's or the checkpoint's.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Optimizer")]
pub struct SettingArgs {
    /// Learning rate [default: 0.001]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Steps over which the learning rate rises [default: 10]
    #[arg(long, value_name = "N", value_parser = parse_whole::<u64>, allow_negative_numbers = true)]
    pub warmup: Option<u64>,
    /// Decay of the first moment [default: 0.9]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub beta1: Option<f64>,
    /// Decay of the second moment [default: 0.95]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub beta2: Option<f64>,
    /// Decoupled weight decay of matrices and embeddings [default: 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub weight_decay: Option<f64>,
    /// Bound of the gradient norm [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub clip: Option<f64>,
}

/// A command's help after its options: text, examples, and what a policy may be.
fn help(text: &str, examples: &str) -> String {
    let mut help = String::new();
    if !text.is_empty() {
        help += &format!("{text}\n\n");
    }
    help += "Policies: a .toml file of rules, or a preset, with arguments as in length_adaptive:threshold=1024:\n";
    for preset in PRESETS {
        let arguments: String = preset.arguments.iter().map(|a| format!(":{}=N", a.name)).collect();
        help += &format!("  {}{arguments}: {}\n", preset.name, preset.about);
    }
    help += "or a byte budget, as --budget has it:\n  budget:BYTES[:max_gradient_error=E][:group=N]\n";
    help + "\nExamples:\n" + examples
}

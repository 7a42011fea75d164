//! Every op against golden values from outside: calls with their attributes, outputs and gradients, and calls that must
//! be refused.
//!
//! The cases are `tests/fixtures/opinfo`, or the folder named by `RETAPE_OPINFO`; `RETAPE_OPINFO_ONLY=add,sub` runs
//! some ops and lists every failure. Ops are called through the families' files, `opinfo/*.rs`; a family's `NOT_YET`
//! names the ops that it still lacks, and must shrink to nothing.
//!
//! Tolerances: f64 1e-10 relative; f32 ten times the error that the reference's own f32 makes in that case, at least
//! 1e-6 relative. Where a tensor's elements cancel, an element may also deviate by that fraction of the tensor's
//! largest element (for a gradient, of the largest cotangent too: it is a sum of products with them), or of 1 if that
//! is smaller.

#[path = "opinfo/call.rs"]
mod call;
#[path = "opinfo/elementwise.rs"]
mod elementwise;
#[path = "opinfo/indexing.rs"]
mod indexing;
#[path = "opinfo/linear.rs"]
mod linear;
#[path = "opinfo/losses.rs"]
mod losses;
#[path = "opinfo/norms.rs"]
mod norms;
#[path = "opinfo/reductions.rs"]
mod reductions;
#[path = "opinfo/shape.rs"]
mod shape;
#[path = "opinfo/spatial.rs"]
mod spatial;

use call::Call;
use retape_core::{BackwardOptions, DType, Device, Result, Tape, TapeOptions, Tensor, Var};
use retape_nn::checkpoint::{self, File};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

type Family = (fn(&str, &Call) -> Option<Result<Vec<Var>>>, &'static [&'static str]);

const FAMILIES: [Family; 8] = [
    (elementwise::call, elementwise::NOT_YET),
    (reductions::call, reductions::NOT_YET),
    (linear::call, linear::NOT_YET),
    (shape::call, shape::NOT_YET),
    (indexing::call, indexing::NOT_YET),
    (losses::call, losses::NOT_YET),
    (norms::call, norms::NOT_YET),
    (spatial::call, spatial::NOT_YET),
];

/// A documented difference of convention.
struct Difference {
    op: &'static str,
    /// Which cases.
    applies: fn(&Value) -> bool,
    /// Which of their elements aren't compared, by what is expected.
    elements: fn(f64) -> bool,
    reason: &'static str,
}

/// The only ways in which a case may differ; each is printed.
const DIFFERENCES: &[Difference] = &[
    Difference {
        op: "amax",
        applies: beyond_rank_64,
        elements: |_| true,
        reason: "tensors may have more than 64 dimensions here",
    },
    Difference {
        op: "amin",
        applies: beyond_rank_64,
        elements: |_| true,
        reason: "tensors may have more than 64 dimensions here",
    },
    Difference {
        op: "elu",
        applies: |case| tagged(case, "nonfinite") && tagged(case, "noncontig"),
        elements: |_| true,
        reason: "at NaN the gradient is NaN, as the reference has it for a contiguous input; for a strided one it \
                 passes there",
    },
    Difference {
        op: "silu",
        applies: |case| tagged(case, "nonfinite"),
        elements: f64::is_nan,
        reason: "at -inf it takes its limit, 0, instead of NaN",
    },
    Difference {
        op: "logsumexp",
        applies: |case| tagged(case, "nonfinite"),
        elements: f64::is_nan,
        reason: "the gradient of nothing but -inf is 0 instead of NaN",
    },
    Difference {
        op: "scaled_dot_product_attention",
        applies: causal_of_two_lengths,
        elements: |_| true,
        reason: "causal alignment is bottom-right where Tq and Tk differ: the last query sees all keys",
    },
    Difference {
        op: "scaled_dot_product_attention",
        applies: |case| {
            case["tensors"].as_object().is_some_and(|t| t.values().all(|t| t["shape"] == json!([1, 1, 2, 2])))
        },
        elements: |e| e == 0.0,
        reason: "where one key takes all the weight, the scores' gradient is 0 up to rounding: it is p (dp - g.o), \
                 not p (dp - sum p dp)",
    },
];

fn tagged(case: &Value, tag: &str) -> bool {
    case["tags"].as_array().is_some_and(|tags| tags.iter().any(|t| t == tag))
}

fn causal_of_two_lengths(case: &Value) -> bool {
    let time = |i: usize| {
        let shape = case["tensors"][case["args"][i]["t"].as_str()?]["shape"].as_array()?;
        shape[shape.len().checked_sub(2)?].as_u64()
    };
    case["kwargs"]["is_causal"] == true && time(0) != time(1)
}

fn beyond_rank_64(case: &Value) -> bool {
    let rank = |t: &Value| t["shape"].as_array().map_or(0, Vec::len);
    case["tensors"].as_object().is_some_and(|tensors| tensors.values().any(|t| rank(t) > 64))
}

#[test]
fn every_op_agrees_with_the_golden_values() {
    let folder = std::env::var_os("RETAPE_OPINFO")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/opinfo")), PathBuf::from);
    let read = |name: &str| -> Value {
        let path = folder.join(name);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let index = read("index.json");
    assert_eq!(index["format"], 1, "the format of {}", folder.display());
    let only = std::env::var("RETAPE_OPINFO_ONLY").ok();
    let mut ops: Vec<&String> = index["ops"].as_object().expect("index.json lists ops").keys().collect();
    ops.retain(|op| only.as_ref().is_none_or(|only| only.split(',').any(|o| o == *op)));
    ops.sort();

    // Panics are caught and reported as failures of their case.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let device = retape_cpu::device();
    let not_yet: Vec<&str> = FAMILIES.iter().flat_map(|(_, not_yet)| not_yet.iter().copied()).collect();
    let mut failed = 0;
    let (mut passed, mut total, mut differences, mut missing, mut failures) = (0, 0, 0, Vec::new(), Vec::new());
    for op in ops {
        let cases = read(&format!("{op}.json"));
        let file = checkpoint::open(&folder.join(format!("{op}.safetensors"))).unwrap();
        let list = |key: &str| cases[key].as_array().cloned().unwrap_or_default();
        let (calls, refusals) = (list("cases"), list("errors"));
        let count = calls.len() + refusals.len();
        total += count;
        let all = calls.iter().map(|c| (c, false)).chain(refusals.iter().map(|c| (c, true)));
        let (mut right, mut wrong) = (0, Vec::new());
        for (case, refused) in all {
            let run = || if refused { refuses(&device, op, case, &file) } else { agrees(&device, op, case, &file) };
            match catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(panicked(&*panic))) {
                Ok(different) => {
                    right += 1;
                    differences += different as usize;
                }
                Err(why) if why == MISSING => {
                    missing.push(op.clone());
                    break;
                }
                Err(why) => wrong.push(format!("{op} {}: {why}\n      {}", case["id"], describe(case))),
            }
        }
        passed += right;
        println!("{op}: {right}/{count}");
        failed += wrong.len();
        let shown = if only.is_some() { wrong.len() } else { 3 };
        let hidden = wrong.len().saturating_sub(shown);
        failures.extend(wrong.into_iter().take(shown));
        failures.extend((hidden > 0).then(|| format!("{op}: {hidden} more")));
    }
    std::panic::set_hook(hook);

    println!("total: {passed}/{total}, of which {differences} are documented differences:");
    DIFFERENCES.iter().for_each(|d| println!("  {}: {}", d.op, d.reason));
    println!("not yet ({}): {}", not_yet.len(), not_yet.join(" "));
    failures.iter().for_each(|f| println!("  {f}"));
    assert!(total > 0, "{} holds no cases: nothing was tested", folder.display());
    let lost: Vec<_> = missing.iter().filter(|op| !not_yet.contains(&op.as_str())).collect();
    assert!(lost.is_empty(), "ops without a dispatch arm, and in no family's NOT_YET: {lost:?}");
    let found: Vec<_> = not_yet
        .iter()
        .filter(|op| only.is_none() && index["ops"].get(op).is_some() && !missing.iter().any(|m| m == *op))
        .collect();
    assert!(found.is_empty(), "in NOT_YET though they have a dispatch arm: {found:?}");
    assert!(failures.is_empty(), "{failed} cases failed, listed above");
}

/// What a call gives for an op that no family knows.
const MISSING: &str = "no dispatch arm";

/// The tape of one case and its tensors.
struct Scene {
    tape: Tape,
    tensors: BTreeMap<String, Var>,
}

fn scene(device: &Device, case: &Value, file: &File) -> Result<Scene, String> {
    let tape = Tape::with(device, TapeOptions { seed: Some(3), ..TapeOptions::default() });
    let mut tensors = BTreeMap::new();
    for (key, meta) in case["tensors"].as_object().expect("a case lists its tensors") {
        let tensor = laid_out(file.read(key, device).map_err(|e| e.to_string())?, meta);
        let leaf = if meta["grad"] == true { tape.leaf(&tensor) } else { tape.constant(&tensor) };
        tensors.insert(key.clone(), leaf.map_err(|e| e.to_string())?);
    }
    Ok(Scene { tape, tensors })
}

/// The tensor as a view with the strides that the case asks for, amid NaN (or ones).
fn laid_out(x: Tensor, meta: &Value) -> Tensor {
    let numbers = |key: &str| -> Option<Vec<usize>> {
        Some(meta[key].as_array()?.iter().map(|n| n.as_u64().expect("a size") as usize).collect())
    };
    let (Some(strides), false) = (numbers("strides"), x.is_empty()) else { return x };
    let offset = meta["offset"].as_u64().unwrap_or(0) as usize;
    let size = x.dtype().size();
    let storage = Tensor::full(x.device(), &[meta["storage"].as_u64().unwrap() as usize], x.dtype(), f64::NAN).unwrap();
    let (mut bytes, values) = (storage.to_bytes().unwrap(), x.to_bytes().unwrap());
    let mut index = vec![0; x.rank()];
    for value in values.chunks(size) {
        let at = size * (offset + index.iter().zip(&strides).map(|(i, s)| i * s).sum::<usize>());
        bytes[at..at + size].copy_from_slice(value);
        for d in (0..index.len()).rev() {
            index[d] += 1;
            if index[d] < x.shape()[d] {
                break;
            }
            index[d] = 0;
        }
    }
    let storage = Tensor::from_bytes(x.device(), storage.shape(), x.dtype(), &bytes).unwrap();
    storage.as_strided(x.shape(), &strides, offset).unwrap()
}

fn dispatch(op: &str, scene: &Scene, case: &Value) -> Result<Result<Vec<Var>>, String> {
    let call = Call::new(&scene.tape, &scene.tensors, case);
    FAMILIES.iter().find_map(|(family, _)| family(op, &call)).ok_or_else(|| MISSING.into())
}

/// Forward and backward agree with the case: Ok(true) but for a documented difference.
fn agrees(device: &Device, op: &str, case: &Value, file: &File) -> Result<bool, String> {
    let scene = scene(device, case, file)?;
    let outputs = dispatch(op, &scene, case)?.map_err(|e| e.to_string())?;
    let golden = |key: &Value| file.read(key.as_str().expect("a key"), device).map_err(|e| e.to_string());
    let keys = case["outputs"].as_array().expect("a case lists its outputs");
    if keys.len() != outputs.len() {
        return Err(format!("{} outputs, {} expected", outputs.len(), keys.len()));
    }
    let cotangents = case["cotangents"].as_array().expect("a case lists its cotangents");
    let mut seeds = Vec::new();
    for (y, key) in outputs.iter().zip(cotangents).filter(|(_, key)| !key.is_null()) {
        seeds.push((y, golden(key)?));
    }
    let terms = seeds.iter().flat_map(|(_, g)| g.to_f64_vec().unwrap()).fold(0.0, |m: f64, g| m.max(g.abs()));
    let seeds: Vec<(&Var, &Tensor)> = seeds.iter().map(|(y, g)| (*y, g)).collect();
    let actual = outputs.iter().map(Var::tensor).collect::<Result<Vec<_>>>().map_err(|e| e.to_string())?;
    let gradients = match seeds.is_empty() {
        true => None,
        false => {
            Some(scene.tape.backward_from(&seeds, BackwardOptions::default()).map_err(|e| format!("backward: {e}"))?)
        }
    };
    let difference = DIFFERENCES.iter().find(|d| d.op == op && (d.applies)(case));
    let skip = difference.map_or((|_| false) as fn(f64) -> bool, |d| d.elements);
    for (i, (y, key)) in actual.iter().zip(keys).enumerate() {
        compare(y, &golden(key)?, 0.0, &case["err"]["out"], skip).map_err(|why| format!("output {i}: {why}"))?;
    }
    for (input, key) in case["grads"].as_object().expect("a case lists its gradients") {
        let actual = gradients.as_ref().and_then(|g| g.of(&scene.tensors[input]));
        let same = match (actual, key.is_null()) {
            (Some(g), false) => compare(g, &golden(key)?, terms, &case["err"]["grad"], skip),
            // No gradient and a gradient of zeros say the same.
            (None, false) => match golden(key)?.to_f64_vec().unwrap().iter().all(|&g| g == 0.0) {
                true => Ok(()),
                false => Err("none, but there must be one".into()),
            },
            (Some(g), true) if g.to_f64_vec().unwrap().iter().any(|&g| g != 0.0) => Err("there must be none".into()),
            (_, true) => Ok(()),
        };
        same.map_err(|why| format!("gradient of {input}: {why}"))?;
    }
    Ok(difference.is_some())
}

/// The call is refused, in forward, with an error that says something.
fn refuses(device: &Device, op: &str, case: &Value, file: &File) -> Result<bool, String> {
    let scene = scene(device, case, file)?;
    match dispatch(op, &scene, case)? {
        Ok(_) if DIFFERENCES.iter().any(|d| d.op == op && (d.applies)(case)) => Ok(true),
        Ok(_) => Err(format!("must be refused: {}", case["message"])),
        Err(e) if e.to_string().len() < 20 => Err(format!("refused, but why? {e}")),
        Err(_) => Ok(false),
    }
}

/// Same dtype, shape and elements (`terms` is the size of what may cancel in them), NaN and infinities included. `err`
/// holds the reference's own absolute and relative error (f32 only).
fn compare(actual: &Tensor, expected: &Tensor, terms: f64, err: &Value, skip: fn(f64) -> bool) -> Result<(), String> {
    if (actual.dtype(), actual.shape()) != (expected.dtype(), expected.shape()) {
        return Err(format!(
            "{}{:?}, expected {}{:?}",
            actual.dtype(),
            actual.shape(),
            expected.dtype(),
            expected.shape()
        ));
    }
    let (a, e) = (actual.to_f64_vec().unwrap(), expected.to_f64_vec().unwrap());
    let largest = e.iter().filter(|x| x.is_finite()).fold(terms, |m, x| m.max(x.abs()));
    let (relative, smallest) = match expected.dtype() {
        DType::F32 => (1e-6, f32::MIN_POSITIVE as f64),
        DType::F64 => (1e-10, f64::MIN_POSITIVE),
        _ => (0.0, 0.0),
    };
    let error = |i: usize| err[i].as_f64().unwrap_or(0.0);
    for (i, (&a, &e)) in a.iter().zip(&e).enumerate() {
        let size = e.abs().max(largest.min(1.0));
        let own = 10.0 * error(0).min(error(1) * size);
        let allowed = (relative * size).max(own).max(smallest);
        if !(skip(e) || a == e || a.is_nan() && e.is_nan() || (a - e).abs() <= allowed) {
            return Err(format!("element {i} is {a:e}, expected {e:e} (may differ by {allowed:.1e})"));
        }
    }
    Ok(())
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("?"))
}

/// The call in short, for messages.
fn describe(case: &Value) -> String {
    let tensor = |key: &str| {
        let t = &case["tensors"][key];
        format!("{}{}{}", t["dtype"].as_str().unwrap_or("?"), t["shape"], if t["strides"].is_null() { "" } else { "*" })
    };
    let show = |v: &Value| v["t"].as_str().map_or_else(|| v.to_string(), tensor);
    let args = case["args"].as_array().map_or(Vec::new(), |a| a.iter().map(show).collect());
    let kwargs = case["kwargs"].as_object().into_iter().flatten().map(|(k, v)| format!("{k}={}", show(v)));
    format!("({}) {}", args.into_iter().chain(kwargs).collect::<Vec<_>>().join(", "), case["tags"])
}

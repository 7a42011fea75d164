//! The command line's contract: exit statuses, one clear line for each wrong input, JSON fields.

mod common;

use common::*;
use serde_json::Value;
use std::fs;

const STEP_FIELDS: &[&str] = &[
    "engine",
    "version",
    "workload",
    "attention",
    "policy",
    "device",
    "threads",
    "dtype",
    "repeats",
    "forward_ms",
    "backward_ms",
    "total_ms",
    "cpu_ms",
    "recompute_ms",
    "quantize_ms",
    "saved_bytes",
    "peak_bytes",
    "predicted_peak_bytes",
    "peak_rss_delta_bytes",
    "param_bytes",
    "loss",
    "grad_norm",
    "gflops",
    "budget_bytes",
    "predicted_overhead_percent",
    "bookkeeping_ms",
    "scratch_bytes",
    "loss_after",
];

const POINT_FIELDS: &[&str] = &[
    "overhead_percent",
    "overhead_wall_percent",
    "share_of_full_savings_percent",
    "share_of_unfused_savings_percent",
    "gradient_error",
    "pareto",
];

#[test]
fn wrong_usage_and_input_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, contents: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, contents).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let binary = file("binary.txt", &[b'a', 0xff, b'b']);
    let short = file("short.txt", b"too short");
    let rules = file("rules.toml", b"[[rule]]\npath = \"**.nothing\"\nmark = \"recompute\"\n");
    let broken = file("broken.toml", b"[[rule]\n");
    let no_model = file("model.safetensors", b"no model");
    let missing = dir.path().join("missing");
    let missing = missing.to_str().unwrap();
    let under_a_file = format!("{short}/out");
    let cases: &[(&[&str], &[&str])] = &[
        (&["fly"], &["fly"]),
        (&["step", "--device", "cuda:one"], &["cuda:one", "cpu, cuda:0"]),
        (&["step", "--device", "abacus"], &["abacus", "cpu, cuda:0"]),
        (&["step", "--memory-limit", "64KiB"], &["out of memory", "--memory-limit"]),
        (&["train", "--memory-limit", "64KiB"], &["out of memory", "--memory-limit"]),
        (&["step", "--memory-limit", "lots"], &["lots", "512MiB"]),
        (&["step", "--policy", "selectiv"], &["unknown policy", "selective"]),
        (&["frontier", "--policies", "none,nosuch"], &["unknown policy", "nosuch", "full_per_layer"]),
        (&["step", "--policy", "int8_all:group=0"], &["group"]),
        (&["step", "--policy", missing], &["unknown policy"]),
        (&["step", "--policy", &format!("{missing}.toml")], &["missing.toml", "can't read"]),
        (&["step", "--policy", &broken], &["broken.toml", "line 1"]),
        (&["step", "--policy", &rules], &["matched no value", "**.nothing"]),
        (&["step", "--mark", "**.nothing=int8"], &["matched no value", "**.nothing=int8"]),
        (&["inspect", "--mark", "**.nothing=int8"], &["matched no value"]),
        (&["step", "--mark", "**.gelu=shrink"], &["shrink", "keep, recompute, int8 and bf16"]),
        (&["step", "--mark", "**.gelu"], &["GLOB=MARK"]),
        (&["step", "--model", "gpt5"], &["gpt5", "gpt2-small"]),
        (&["step", "--dim", "33"], &["dim", "heads"]),
        (&["step", "--seq", "0"], &["seq", "at least 1"]),
        (&["step", "--dropout", "1.5"], &["dropout"]),
        (&["step", "--dtype", "i64"], &["f32, f64, bf16 or f16"]),
        (&["step", "--tied", "maybe"], &["on or off"]),
        (&["step", "--threads", "0"], &["--threads"]),
        (&["step", "--seq", "2000000"], &["2000000"]),
        (&["step", "--layers", "-1"], &["--layers", "-1", "whole number"]),
        (&["step", "--seed", "1e3"], &["--seed", "1e3", "whole number"]),
        (&["step", "--memory-limit", "-5"], &["-5", "512MiB"]),
        (&["train", "--steps", "-1"], &["--steps", "1 or more"]),
        (&["step", "--batch", "1000000000000"], &["--device meta"]),
        (&["inspect", "--attention", "both"], &["one form"]),
        (&["train", "--device", "meta"], &["--device cpu"]),
        (&["train", "--data", missing], &["can't read", "missing"]),
        (&["train", "--data", &binary], &["not UTF-8", "byte 1"]),
        (&["train", "--data", &short], &["9 bytes", "at least 33"]),
        (&["train", "--val", missing], &["can't read", "missing"]),
        (&["train", "--init", missing], &["can't read", "missing"]),
        (&["train", "--init", &no_model], &["safetensors"]),
        (&["train", "--resume", missing], &["no checkpoint"]),
        (&["train", "--save", &under_a_file], &["--save"]),
        (&["train", "--vocab", "97"], &["at least 256"]),
        (&["train", "--steps", "0"], &["--steps"]),
        (&["train", "--lr", "-1"], &["lr must be", "-1"]),
        (&["train", "--clip", "0"], &["above 0"]),
        (&["step", "--dropout", "-0.5"], &["dropout", "[0, 1)"]),
        (&["frontier", "--out", &under_a_file], &["--out"]),
    ];
    for (args, words) in cases {
        let own: Vec<&str> = SMALL.chunks(2).filter(|flag| !args.contains(&flag[0])).flatten().copied().collect();
        let model = if args[0] == "fly" { Vec::new() } else { own };
        let output = run(&[args, &model[..]].concat());
        println!("{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert_refused(&output, words);
    }
}

#[test]
fn a_model_beyond_this_machine_is_refused() {
    if fs::metadata("/proc/meminfo").is_ok() {
        assert_refused(&run(&["step", "--model", "gpt3-175b"]), &["--device meta"]);
    }
}

#[test]
fn help_has_examples() {
    for command in ["", "frontier", "step", "inspect", "timeline", "plan", "train"] {
        let args: Vec<&str> = [command, "--help"].into_iter().filter(|a| !a.is_empty()).collect();
        let text = stdout(&run(&args));
        assert!(text.contains("Examples:") && text.contains("--memory-limit"), "{text}");
        assert!(text.contains("--budget"), "{text}");
    }
    assert!(stdout(&run(&["step", "--help"])).contains("length_adaptive"));
    assert!(stdout(&run(&["--version"])).starts_with("retape 0."));
}

#[test]
fn step_prints_its_line() {
    let lines = json_lines(&run_small(&["step", "--json", "--steps", "2", "--policy", "selective", "--by-op"]));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert_fields(line, STEP_FIELDS);
    assert_eq!(line["engine"], "retape");
    assert_eq!(
        (&line["workload"], &line["attention"], &line["policy"]),
        (&"tiny".into(), &"flash".into(), &"selective".into())
    );
    assert_eq!((line["threads"].as_u64(), line["repeats"].as_u64()), (Some(1), Some(2)));
    assert_eq!(line["budget_bytes"], Value::Null);
    assert_eq!(line["peak_bytes"], line["predicted_peak_bytes"]);
    for time in ["forward_ms", "backward_ms", "total_ms", "cpu_ms", "recompute_ms", "gflops", "loss", "grad_norm"] {
        assert!(line[time].as_f64().is_some_and(|ms| ms > 0.0), "{time} in {line}");
    }
    let by_op = line["by_op"].as_array().unwrap();
    assert!(
        by_op.iter().any(|row| row["path"] == "transformer.h.0.mlp.gelu" && row["replay_ms"].as_f64() > Some(0.0)),
        "{by_op:?}"
    );
    if fs::metadata("/proc/self/clear_refs").is_ok() {
        assert!(line["peak_rss_delta_bytes"].is_u64(), "{line}");
    }
}

#[test]
fn step_takes_several_policies_marks_and_forms() {
    let args = [
        "step",
        "--json",
        "--steps",
        "1",
        "--policy",
        "none",
        "--policy",
        "int8_all:group=32",
        "--attention",
        "both",
        "--mark",
        "blocks.0.mlp.gelu=recompute",
    ];
    let lines = json_lines(&run_small(&args));
    assert_eq!(lines.len(), 4);
    for line in &lines {
        assert_eq!(line["marks"], serde_json::json!(["blocks.0.mlp.gelu=recompute"]));
        assert!(line["predicted_overhead_percent"].as_f64() > Some(0.0), "{line}");
    }
}

#[test]
fn tables_are_for_people_and_stdout_is_clean() {
    let step = run_small(&["step", "--steps", "1", "--by-op"]);
    assert!(stdout(&step).contains("peak of the step"));
    assert!(step.stderr.is_empty(), "no progress bar without a terminal");
    let frontier = stdout(&run_small(&["frontier", "--steps", "1", "--policies", "none,full_per_layer"]));
    assert!(frontier.contains("full_per_layer") && frontier.contains("to the byte"), "{frontier}");
    let inspect = stdout(&run_small(&["inspect", "--policy", "selective_ffn"]));
    assert!(inspect.contains("transformer.h.*.mlp.gelu") && inspect.contains("peak of the step"), "{inspect}");
}

#[test]
fn frontier_measures_every_preset_and_predicts_every_peak() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let output =
        run_small(&["frontier", "--json", "--steps", "2", "--train-steps", "2", "--out", out.to_str().unwrap()]);
    let lines = json_lines(&output);
    let [document] = &lines[..] else { panic!("{} lines", lines.len()) };
    assert_fields(document, &["model", "device", "points"]);
    assert_eq!(document["model"]["layers"], 2);
    let points = document["points"].as_array().unwrap();
    let budgets = points.iter().filter(|p| p["budget_bytes"].is_u64());
    let infeasible = 6 - budgets.count(); // on a model as small as this some of the default budgets are
    assert!(infeasible < 6);
    assert_eq!(points.len() + infeasible, 2 * (retape::policy::PRESETS.len() + 3));
    for point in points {
        assert_fields(point, STEP_FIELDS);
        assert_fields(point, POINT_FIELDS);
        assert_eq!(point["peak_bytes"], point["predicted_peak_bytes"], "{point}");
        let exact = point["gradient_error"] == 0.0;
        assert_eq!(exact, !point["policy"].as_str().unwrap().starts_with("int8"), "{point}");
        assert!(point["loss_after"].is_f64(), "{point}");
        let share = point["share_of_full_savings_percent"].as_f64().unwrap();
        match point["policy"].as_str().unwrap() {
            "none" => assert_eq!((share, &point["overhead_percent"]), (0.0, &0.0.into())),
            "full_per_layer" => assert_eq!(share, 100.0),
            _ => {}
        }
    }
    let peak = |p: &Value| p["peak_bytes"].as_u64().unwrap();
    let overhead = |p: &Value| p["overhead_percent"].as_f64().unwrap();
    for p in points {
        let beaten = points.iter().any(|o| peak(o) < peak(p) && overhead(o) < overhead(p));
        assert_eq!(p["pareto"], !beaten);
    }

    let text = fs::read_to_string(out.join("frontier.json")).unwrap();
    assert_eq!(&serde_json::from_str::<Value>(&text).unwrap(), document);
    let csv = fs::read_to_string(out.join("frontier.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + points.len());
    let header: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    assert!(STEP_FIELDS.iter().chain(POINT_FIELDS).all(|field| header.contains(field)), "{header:?}");
    let svg = fs::read_to_string(out.join("frontier.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(retape::policy::PRESETS.iter().all(|preset| svg.contains(preset.name)));
}

#[test]
fn meta_predicts_without_numbers() {
    let document =
        &json_lines(&run(&["frontier", "--json", "--device", "meta", "--model", "gpt2-xl", "--attention", "flash"]))[0];
    for point in document["points"].as_array().unwrap() {
        assert_eq!(
            (&point["loss"], &point["cpu_ms"], &point["gradient_error"]),
            (&Value::Null, &Value::Null, &Value::Null)
        );
        assert_eq!(point["peak_bytes"], point["predicted_peak_bytes"]);
    }
}

#[test]
fn dry_runs_take_sizes_that_no_text_has() {
    for size in [["--batch", "1000000000"], ["--seq", "2000000"]] {
        let lines = json_lines(&run(&[&["step", "--device", "meta", "--json"], &size[..]].concat()));
        assert!(lines[0]["peak_bytes"].as_u64().unwrap() > 1 << 34, "{}", lines[0]);
        assert!(stdout(&run(&[&["inspect"], &size[..]].concat())).contains("dry run"));
    }
}

#[test]
fn inspect_prints_the_ledger() {
    let document =
        &json_lines(&run_small(&["inspect", "--json", "--policy", "selective", "--attention", "explicit"]))[0];
    assert_fields(document, &["values", "totals", "lint"]);
    let values = document["values"].as_array().unwrap();
    for value in values {
        assert_fields(
            value,
            &[
                "id",
                "path",
                "op",
                "shape",
                "dtype",
                "bytes",
                "stored_bytes",
                "mark",
                "rule",
                "readers",
                "recompute_flops",
                "depth",
                "quantization_error",
                "held_by_handle",
            ],
        );
    }
    let sum: u64 = values.iter().map(|v| v["stored_bytes"].as_u64().unwrap()).sum();
    assert_eq!(document["totals"]["stored_bytes"], sum);
    assert!(document["totals"]["peak_bytes"].as_u64().unwrap() > sum);
    let softmax = values.iter().find(|v| v["path"] == "transformer.h.1.attn.softmax").unwrap();
    assert_eq!((&softmax["mark"], softmax["stored_bytes"].as_u64()), (&"recompute".into(), Some(0)));
    // The peak is the one that a real step has.
    let step = &json_lines(&run_small(&[
        "step",
        "--json",
        "--steps",
        "0",
        "--policy",
        "selective",
        "--attention",
        "explicit",
    ]))[0];
    assert_eq!(document["totals"]["peak_bytes"], step["peak_bytes"]);
    assert_eq!(document["totals"]["stored_bytes"], step["saved_bytes"]);
}

#[test]
fn inspect_takes_the_largest_models() {
    for model in ["gpt2-xl", "gpt3-175b"] {
        for policy in ["none", "full_per_layer", "sqrt_n", "int8_all"] {
            let document = &json_lines(&run(&["inspect", "--json", "--model", model, "--policy", policy]))[0];
            assert!(document["totals"]["peak_bytes"].as_u64() > Some(1 << 27), "{model} {policy}");
        }
    }
}

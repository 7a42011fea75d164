//! Budgets: what `plan` promises is what a step takes.

mod common;

use common::{assert_fields, assert_refused, json_lines, run_small, stdout};
use serde_json::Value;
use std::fs;

fn one(args: &[&str]) -> Value {
    json_lines(&run_small(args)).remove(0)
}

#[test]
fn a_plan_is_kept_to_the_byte() {
    let none = one(&["step", "--json", "--steps", "0"]);
    let mut slowest = f64::INFINITY;
    for budget in ["45%", "60%", "80%", "100%", "1GiB"] {
        let plan = one(&["plan", "--json", "--budget", budget]);
        assert_fields(
            &plan,
            &["marks", "budget_bytes", "predicted_peak_bytes", "predicted_overhead_percent", "smallest_feasible_bytes"],
        );
        assert_fields(&plan["marks"][0], &["path", "mark"]);
        assert_eq!(plan["gradient_error_bound"], 0.0);
        let step = one(&["step", "--json", "--steps", "0", "--budget", budget]);
        assert_eq!(step["budget_bytes"], plan["budget_bytes"]);
        assert_eq!(step["peak_bytes"], plan["predicted_peak_bytes"]);
        assert_eq!(step["predicted_peak_bytes"], plan["predicted_peak_bytes"]);
        assert!(step["peak_bytes"].as_u64() <= plan["budget_bytes"].as_u64());
        assert_eq!((&step["loss"], &step["grad_norm"]), (&none["loss"], &none["grad_norm"]));
        let overhead = plan["predicted_overhead_percent"].as_f64().unwrap();
        assert!(overhead <= slowest, "{budget}: {overhead} after {slowest}");
        slowest = overhead;
    }
    assert_eq!(slowest, 0.0);
}

#[test]
fn the_smallest_budget_that_an_error_names_has_a_plan() {
    let refused = run_small(&["plan", "--budget", "1000"]);
    assert_refused(&refused, &["no plan is known to fit 1000 bytes", "smallest"]);
    assert_refused(&run_small(&["train", "--budget", "1000", "--steps", "1"]), &["no plan is known to fit 1000 bytes"]);
    let message = String::from_utf8(refused.stderr).unwrap();
    let smallest: u64 = message.split_whitespace().rev().find_map(|word| word.parse().ok()).unwrap();
    let plan = one(&["plan", "--json", "--budget", &smallest.to_string()]);
    assert_eq!(plan["predicted_peak_bytes"], smallest);
    assert_refused(&run_small(&["plan", "--budget", &(smallest - 1).to_string()]), &["no plan is known to fit"]);
}

#[test]
fn a_plan_is_a_file_that_policy_takes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan.toml");
    let file = file.to_str().unwrap();
    for attention in ["flash", "explicit"] {
        let model = ["--attention", attention, "--mark", "blocks.0.mlp.gelu=keep"];
        let plan = one(&[&["plan", "--json", "--budget", "60%", "--out", file][..], &model].concat());
        // The file has the mark in it.
        let step = one(&["step", "--json", "--steps", "0", "--policy", file, "--attention", attention]);
        assert_eq!(step["peak_bytes"], plan["predicted_peak_bytes"]);
        assert_eq!(step["predicted_overhead_percent"], plan["predicted_overhead_percent"]);
        let marked = |path: &str| plan["marks"].as_array().unwrap().iter().any(|m| m["path"] == path);
        assert!(
            marked("transformer.h.1.mlp.gelu") && !marked("transformer.h.0.mlp.gelu"),
            "what a user marks isn't planned"
        );
    }
    // On another model, what the file names isn't there.
    assert_refused(&run_small(&["step", "--policy", file, "--attention", "flash"]), &["matched no value", "ids="]);
}

#[test]
fn int8_stays_within_its_bound() {
    for bound in ["0.1", "0.002"] {
        let args = ["frontier", "--json", "--steps", "0", "--attention", "flash", "--budgets", "40%"];
        let frontier = one(&[&args[..], &["--max-gradient-error", bound]].concat());
        let point = &frontier["points"][1];
        assert_eq!(point["policy"], format!("budget:40%:max_gradient_error={bound}"));
        let error = point["gradient_error"].as_f64().unwrap();
        assert!(error <= bound.parse().unwrap(), "{error} over {bound}");
        assert!(bound == "0.002" || error > 0.0, "int8 is used where it may be");
    }
}

#[test]
fn exact_and_int8_budgets_stand_side_by_side() {
    let policies = "budget:40%,budget:40%:max_gradient_error=0.1,budget:60%";
    let frontier = one(&["frontier", "--json", "--steps", "0", "--attention", "flash", "--policies", policies]);
    let errors: Vec<f64> = (1..4).map(|i| frontier["points"][i]["gradient_error"].as_f64().unwrap()).collect();
    assert!(errors[0] == 0.0 && errors[1] > 0.0 && errors[2] == 0.0, "{errors:?}");
}

#[test]
fn a_profile_is_saved_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("here.toml");
    let file = file.to_str().unwrap();
    let plan = ["plan", "--json", "--budget", "50%", "--max-gradient-error", "0.05"];
    let measured = one(&[&plan[..], &["--measure", "--save-profile", file]].concat());
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains("[costs.seconds]") && text.contains("[sensitivity.int8]"), "{text}");
    let loaded = one(&[&plan[..], &["--profile", file]].concat());
    assert_eq!(measured["marks"], loaded["marks"]);
    let other = [&plan[..], &["--profile", file, "--int8-group", "16"]].concat();
    assert_refused(&run_small(&other), &["groups of 64", "--int8-group 64"]);
    // Without a device that computes, too.
    let meta = one(&[&plan[..], &["--profile", file, "--device", "meta"]].concat());
    assert_eq!(measured["marks"], meta["marks"]);
    // Of a file without errors all formats are measured.
    let costs = dir.path().join("costs.toml");
    let costs = costs.to_str().unwrap();
    one(&["plan", "--json", "--budget", "50%", "--measure", "--save-profile", costs]);
    one(&[&plan[..], &["--profile", costs, "--save-profile", file]].concat());
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains("[sensitivity.int8]") && text.contains("[sensitivity.bf16]"), "{text}");
}

#[test]
fn training_keeps_to_a_budget_and_resumes_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (whole, part) = (path("whole"), path("part"));
    let train = |args: &[&str]| json_lines(&run_small(&[&["train", "--json"], args].concat()));
    let plain = train(&["--steps", "6"]);
    let lines = train(&["--steps", "6", "--budget", "50%", "--save", &whole]);
    for (line, plain) in lines.iter().zip(&plain) {
        assert!(line["peak_bytes"].as_u64() <= line["budget_bytes"].as_u64());
        assert!(line["budget_bytes"].is_u64() && plain["budget_bytes"].is_null());
        assert_eq!(line["loss"], plain["loss"]);
    }
    train(&["--steps", "3", "--budget", "50%", "--save", &part]);
    train(&["--steps", "3", "--resume", &part, "--save", &part]);
    let of = |dir: &str| fs::read(format!("{dir}/step-6/model.safetensors")).unwrap();
    assert!(of(&whole) == of(&part), "other bits");
}

#[test]
fn wrong_budgets_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken.toml");
    fs::write(&broken, "[costs]\nflops_per_second = -1.0\nbytes_per_second = 1.0\n").unwrap();
    let broken = broken.to_str().unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["plan"], &["--budget"]),
        (&["plan", "--budget", "half"], &["half", "75%"]),
        (&["plan", "--budget", "-5%"], &["-5%"]),
        (&["step", "--budget", "50%", "--policy", "none"], &["--policy", "cannot be used"]),
        (&["frontier", "--budgets", "50%,much"], &["much"]),
        (&["step", "--policy", "budget:50%:speed=2"], &["speed=2", "max_gradient_error=E"]),
        (&["step", "--policy", "budget:50%:group=0"], &["group=N"]),
        (&["plan", "--budget", "50%", "--max-gradient-error", "-1"], &["-1", "0.01"]),
        (
            &["plan", "--budget", "50%", "--max-gradient-error", "0.1", "--device", "meta"],
            &["--device cpu", "--profile"],
        ),
        (&["plan", "--budget", "50%", "--measure", "--device", "meta"], &["--device cpu"]),
        (&["plan", "--budget", "50%", "--measure", "--profile", broken], &["leave one out"]),
        (&["plan", "--budget", "50%", "--profile", "/missing.toml"], &["/missing.toml", "can't read"]),
        (&["plan", "--budget", "50%", "--profile", broken], &["flops_per_second", "positive"]),
        (&["plan", "--budget", "50%", "--out", "/missing/plan.toml"], &["--out", "can't write"]),
        (&["step", "--policy", "none", "--max-gradient-error", "0.1"], &["--max-gradient-error", "add --budget"]),
        (&["inspect", "--profile", broken], &["--profile", "add --budget"]),
        (&["frontier", "--policies", "none", "--int8-group", "32"], &["--int8-group", "add --budget"]),
        (&["plan", "--budget", "50%", "--attention", "both"], &["one form"]),
        (&["plan", "--budget", "50%", "--mark", "**.nothing=int8"], &["matched no value"]),
    ];
    for (args, words) in cases {
        let own: Vec<&str> = common::SMALL.chunks(2).filter(|f| !args.contains(&f[0])).flatten().copied().collect();
        let output = common::run(&[args, &own[..]].concat());
        println!("{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert_refused(&output, words);
    }
    assert!(stdout(&common::run(&["plan", "--help"])).contains("--max-gradient-error"));
}

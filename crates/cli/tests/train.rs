//! Training from the command line: checkpoints, resuming with the same bits, kills.

mod common;

use common::*;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

fn train(args: &[&str]) -> Vec<Value> {
    json_lines(&run_small(&[&["train", "--json", "--dropout", "0.1", "--policy", "selective"], args].concat()))
}

fn losses(lines: &[Value]) -> Vec<(u64, f64)> {
    lines.iter().map(|l| (l["step"].as_u64().unwrap(), l["loss"].as_f64().unwrap())).collect()
}

fn path(dir: &tempfile::TempDir, name: &str) -> String {
    dir.path().join(name).to_str().unwrap().to_owned()
}

fn checkpoints(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    entries.filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with("step-")).collect()
}

fn assert_same_files(a: &Path, b: &Path) {
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert!(fs::read(a.join(file)).unwrap() == fs::read(b.join(file)).unwrap(), "{file} differs");
    }
}

#[test]
fn lines_have_their_fields_and_the_loss_falls() {
    let lines = train(&["--steps", "30", "--val-every", "10"]);
    assert_eq!(lines.len(), 30);
    for (i, line) in lines.iter().enumerate() {
        assert_fields(line, &["step", "loss", "tokens_per_s", "peak_bytes", "budget_bytes", "validation_loss"]);
        assert_eq!(line["step"], i + 1);
        assert_eq!(line["validation_loss"].is_f64(), (i + 1) % 10 == 0, "{line}");
        assert_eq!((&line["budget_bytes"], &line["peak_bytes"]), (&Value::Null, &lines[0]["peak_bytes"]));
    }
    let losses = losses(&lines);
    assert!(losses[29].1 < losses[0].1 - 0.3, "{losses:?}");
}

#[test]
fn a_resumed_run_has_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, halves) = (path(&dir, "whole"), path(&dir, "halves"));
    let at_once = train(&["--steps", "6", "--save", &whole, "--seed", "7"]);
    let mut in_two = train(&["--steps", "3", "--save", &halves, "--seed", "7"]);
    let more = ["train", "--json", "--resume", &halves, "--save", &halves, "--steps", "3", "--threads", "2"];
    in_two.extend(json_lines(&run(&more)));
    assert_eq!(losses(&at_once), losses(&in_two));
    assert_eq!(at_once[5]["validation_loss"], in_two[5]["validation_loss"]);
    assert_same_files(&Path::new(&whole).join("step-6"), &Path::new(&halves).join("step-6"));
    assert_eq!(checkpoints(Path::new(&halves)).len(), 1, "the older checkpoint is gone");

    // What would change the bits, or another run's checkpoints, is refused.
    for (args, words) in [
        (&["--seed", "8"][..], "--seed"),
        (&["--layers", "3"], "the model"),
        (&["--attention", "explicit"], "the model"),
    ] {
        assert_refused(&run(&[&["train", "--resume", &halves], args].concat()), &[words, "differs"]);
    }
    assert_refused(&run_small(&["train", "--save", &halves]), &["saved there already", "--resume"]);
    fs::write(dir.path().join("other.txt"), "another text, long enough for a window of 32 tokens").unwrap();
    let other = path(&dir, "other.txt");
    assert_refused(&run(&["train", "--resume", &halves, "--data", &other]), &["the text", "differs"]);
    fs::write(Path::new(&halves).join("step-6/config.json"), "{}").unwrap();
    assert_refused(&run(&["train", "--resume", &halves]), &["no checkpoint of retape"]);
}

#[test]
fn sixteen_bits_train_and_resume_with_the_same_bits() {
    for dtype in ["bf16", "f16"] {
        let dir = tempfile::tempdir().unwrap();
        let (whole, halves) = (path(&dir, "whole"), path(&dir, "halves"));
        let at_once = train(&["--steps", "20", "--save", &whole, "--dtype", dtype]);
        let mut in_two = train(&["--steps", "10", "--save", &halves, "--dtype", dtype]);
        in_two.extend(json_lines(&run(&["train", "--json", "--resume", &halves, "--save", &halves, "--steps", "10"])));
        assert_eq!(losses(&at_once), losses(&in_two));
        assert_same_files(&Path::new(&whole).join("step-20"), &Path::new(&halves).join("step-20"));
        assert!(losses(&at_once)[19].1 < losses(&at_once)[0].1 - 0.3, "{dtype}");
        let config = |dir: &str| fs::read_to_string(Path::new(dir).join("step-20/config.json")).unwrap();
        assert_eq!(config(&whole), config(&halves));
        let config: Value = serde_json::from_str(&config(&whole)).unwrap();
        assert_eq!(config.get("scaler").map(|s| s["good"].as_u64().unwrap()), (dtype == "f16").then_some(20));
        assert_eq!(at_once[0].get("loss_scale").is_some(), dtype == "f16");
    }
}

#[test]
fn a_model_that_diverged_replaces_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let save = path(&dir, "run");
    train(&["--steps", "2", "--save", &save]);
    // The last step's update is too large, and no later gradient shows it.
    let output = run(&["train", "--resume", &save, "--save", &save, "--steps", "1", "--lr", "1e300"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("infinity or NaN after step 3") && message.contains("--lr"), "{message}");
    assert_eq!(checkpoints(Path::new(&save)), [Path::new(&save).join("step-2")]);
    assert_eq!(json_lines(&run(&["train", "--json", "--resume", &save, "--steps", "1"]))[0]["step"], 3);
}

#[cfg(unix)]
#[test]
fn one_process_saves_in_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let save = path(&dir, "run");
    let start = [&["train", "--steps", "1000000", "--save", &save, "--save-every", "1"], SMALL].concat();
    let mut first = command(&start).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // Held to the end: a process whose reader has gone stops at its next line.
    let mut lines = BufReader::new(first.stdout.take().unwrap());
    lines.read_line(&mut String::new()).unwrap();
    assert_refused(&run_small(&["train", "--steps", "1", "--save", &save]), &["another process", "--save"]);
    let again = ["train", "--resume", &save, "--save", &save, "--steps", "1"];
    let refused = run(&again);
    first.kill().unwrap();
    first.wait().unwrap();
    drop(lines);
    assert_eq!(refused.status.code(), Some(2));
    if !checkpoints(Path::new(&save)).is_empty() {
        stdout(&run(&again)); // the lock went with the process
    }
}

#[test]
fn init_takes_a_checkpoint_of_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let saved = path(&dir, "saved");
    let first = train(&["--steps", "20", "--save", &saved]);
    let model = format!("{saved}/step-20/model.safetensors");
    let second = train(&["--steps", "1", "--init", &model]);
    assert!(losses(&second)[0].1 < losses(&first)[0].1 - 0.2);
    assert_refused(&run_small(&["train", "--init", &model, "--vocab", "300"]), &["this model needs"]);
}

#[test]
fn files_are_trained_and_validated_on() {
    let dir = tempfile::tempdir().unwrap();
    let text = |name: &str, unit: &str| {
        fs::write(dir.path().join(name), unit.repeat(100)).unwrap();
        path(&dir, name)
    };
    let (data, val) = (text("data.txt", "abcdefgh"), text("val.txt", "abcdefgh "));
    let lines = train(&["--steps", "3", "--data", &data, "--val", &val]);
    assert!(lines[2]["validation_loss"].is_f64());
    assert!(train(&["--steps", "1", "--data", &data])[0]["validation_loss"].is_null());
}

/// Kills the run at many moments, those of writing among them; each time the directory resumes, and in the end the bits
/// are those of a run that nobody killed.
#[cfg(unix)]
#[test]
fn checkpoints_survive_kills() {
    let dir = tempfile::tempdir().unwrap();
    let (killed, whole) = (path(&dir, "killed"), path(&dir, "whole"));
    let common = ["train", "--json", "--save", &killed, "--save-every", "1", "--steps", "100000"];
    let mut last = 0;
    let mut random = 12345_u64;
    let mut survived = 0;
    for kill in 0..40 {
        let has_checkpoint = Path::new(&killed).is_dir() && !checkpoints(Path::new(&killed)).is_empty();
        let mut args = common.to_vec();
        if has_checkpoint {
            args.extend(["--resume", &killed]);
        } else {
            args.extend(SMALL);
        }
        let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        // One in four dies while it starts, the others after one to three steps: while they train or write.
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        (0..kill % 4).for_each(|_| drop(lines.next().unwrap().unwrap()));
        drop(lines);
        std::thread::sleep(Duration::from_micros((random >> 33) % 60_000));
        child.kill().unwrap(); // SIGKILL
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.code().is_none(),
            "kill {kill}: it ended itself: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        if has_checkpoint {
            let found = checkpoints(Path::new(&killed));
            let steps = found.iter().map(|p| p.file_name().unwrap().to_str().unwrap()[5..].parse::<u64>().unwrap());
            let step = steps.max().expect("a checkpoint is never lost");
            assert!(step >= last, "kill {kill}: from step {last} back to {step}");
            survived += u64::from(step > last);
            last = step;
        }
    }
    assert!(survived > 5, "too few kills came while training");
    // It resumes, and reaches the same bits as a run that nobody killed.
    let resume = ["train", "--json", "--resume", &killed, "--save", &killed, "--steps", "1"];
    let lines = json_lines(&run(&resume));
    let total = lines[0]["step"].as_u64().unwrap();
    assert_eq!(total, last + 1);
    run_small(&["train", "--save", &whole, "--steps", &total.to_string()]);
    let name = format!("step-{total}");
    assert_same_files(&Path::new(&killed).join(&name), &Path::new(&whole).join(&name));
    let left: Vec<_> = fs::read_dir(&killed).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, [std::ffi::OsString::from(&name)], "nothing unfinished is left");
}

/// No bound of the gradients' norm is infinity, which JSON can't write as a number.
#[test]
fn a_run_without_clipping_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, halves) = (path(&dir, "whole"), path(&dir, "halves"));
    train(&["--steps", "4", "--save", &whole, "--clip", "inf"]);
    train(&["--steps", "2", "--save", &halves, "--clip", "inf"]);
    stdout(&run(&["train", "--resume", &halves, "--save", &halves, "--steps", "2"]));
    assert_same_files(&Path::new(&whole).join("step-4"), &Path::new(&halves).join("step-4"));
    let config = fs::read_to_string(Path::new(&halves).join("step-4/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["settings"]["clip"], "inf");
}

/// Options at their extremes: refused before anything is written, or saved and read back.
#[test]
fn options_at_their_extremes_resume_or_are_refused() {
    const NUMBERS: &[&str] = &["inf", "-inf", "nan", "1e-320", "0", "-1", "0.30000000000000004", "1e308"];
    const WHOLES: &[&str] = &["0", "1", "9007199254740993", "18446744073709551615"];
    let options = [
        ("--lr", NUMBERS),
        ("--beta1", NUMBERS),
        ("--beta2", NUMBERS),
        ("--weight-decay", NUMBERS),
        ("--clip", NUMBERS),
        ("--dropout", NUMBERS),
        ("--warmup", WHOLES),
        ("--seed", WHOLES),
    ];
    for (option, values) in options {
        for value in values {
            let dir = tempfile::tempdir().unwrap();
            let save = path(&dir, "run");
            let given = format!("{option}={value}");
            let output = run_small(&["train", "--steps", "1", "--save", &save, &given]);
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            match output.status.code() {
                Some(0) => drop(stdout(&run(&["train", "--resume", &save, "--steps", "1", "--lr", "0"]))),
                // An update that isn't finite is found before it is saved.
                Some(1) => assert!(message.contains("infinity or NaN"), "{given}: {message}"),
                // What only the first step shows comes after the directory was made.
                Some(2) if given == "--clip=1e-320" => assert!(checkpoints(Path::new(&save)).is_empty()),
                Some(2) => assert!(!Path::new(&save).exists(), "{given}: refused, and yet written to"),
                other => panic!("{given}: {other:?} {message}"),
            }
            let finite = !["inf", "-inf", "nan", "-1"].contains(value);
            let right = match option {
                "--clip" => *value == "inf" || (finite && !["0", "1e-320"].contains(value)),
                "--beta1" | "--beta2" | "--dropout" => finite && *value != "1e308",
                _ => finite,
            };
            assert_eq!(output.status.code() != Some(2), right, "{given}: {message}");
        }
    }
}

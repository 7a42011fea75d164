//! What can be looked at: memory over a step, two policies side by side, other engines' points.

mod common;

use common::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no whole number: {value}"))
}

#[test]
fn views_refuse_wrong_usage_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let file = |name: &str, contents: &str| {
        fs::write(dir.path().join(name), contents).unwrap();
        at(name)
    };
    let out = at("out");
    let not_json = file("not.json", "peers");
    let no_list = file("object.json", "{}");
    let lacking = file("lacking.json", r#"[{"engine":"other","label":"full","overhead_percent":30}]"#);
    let nameless = file("nameless.json", r#"[{"engine":"other","label":" ","peak_bytes":5,"overhead_percent":30}]"#);
    let negative = file("negative.json", r#"[{"engine":"o","label":"l","peak_bytes":-5,"overhead_percent":30}]"#);
    let under_a_file = format!("{not_json}/timeline.html");
    let page = at("timeline.html");
    let cases: &[(&[&str], &[&str])] = &[
        (&["timeline"], &["--out FILE.html", "--json"]),
        (&["timeline", "--out", &under_a_file], &["--out", "can't write"]),
        (&["timeline", "--out", &page, "--policy", "selectiv"], &["unknown policy", "selective"]),
        (&["timeline", "--out", &page, "--attention", "both"], &["one form"]),
        (&["timeline", "--out", &page, "--mark", "**.nothing=int8"], &["matched no value"]),
        (&["timeline", "--out", &page, "--memory-limit", "64KiB"], &["out of memory"]),
        (&["inspect", "--diff", "selectiv"], &["unknown policy", "selective"]),
        (&["frontier", "--peers", &not_json], &["--out"]),
        (&["frontier", "--out", &out, "--peers", &at("missing.json")], &["--peers", "can't read"]),
        (&["frontier", "--out", &out, "--peers", &not_json], &["--peers", "not.json", "list"]),
        (&["frontier", "--out", &out, "--peers", &no_list], &["--peers", "list"]),
        (&["frontier", "--out", &out, "--peers", &lacking], &["--peers", "peak_bytes"]),
        (&["frontier", "--out", &out, "--peers", &nameless], &["--peers", "name"]),
        (&["frontier", "--out", &out, "--peers", &negative], &["--peers", "peak_bytes"]),
    ];
    for (args, words) in cases {
        let output = run_small(args);
        println!("{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert_refused(&output, words);
    }
    assert!(!fs::exists(&page).unwrap(), "a refused command writes nothing");
}

#[test]
fn a_timeline_adds_up() {
    for (policy, attention) in
        [("none", "flash"), ("selective", "explicit"), ("int8_all", "flash"), ("sqrt_n", "flash")]
    {
        let args = ["--json", "--policy", policy, "--attention", attention];
        let document = &json_lines(&run_small(&[&["timeline"], &args[..]].concat()))[0];
        let step = &json_lines(&run_small(&[&["step", "--steps", "0"], &args[..]].concat()))[0];
        assert_eq!(document["peak_bytes"], step["peak_bytes"], "{policy}");
        assert_eq!(document["saved_bytes"], step["saved_bytes"], "{policy}");
        let contents = document["contents"].as_array().unwrap();
        assert_eq!(contents.iter().map(|c| number(&c["bytes"])).sum::<u64>(), number(&document["peak_bytes"]));
        assert!(contents.iter().all(|c| c["path"].is_string()), "{contents:#?}");
        let moments = document["moments"].as_array().unwrap();
        let highest = moments.iter().map(|m| number(&m["highest_bytes"])).max();
        assert_eq!(highest, document["peak_bytes"].as_u64());
        let phases: Vec<&str> = moments.iter().map(|m| m["phase"].as_str().unwrap()).collect();
        assert_eq!(phases.contains(&"replay"), matches!(policy, "selective" | "sqrt_n"), "{policy}");
        assert!(phases.contains(&"forward") && phases.contains(&"backward"));
        assert!(moments.iter().all(|m| m["path"].is_string() && m["op"].is_string()));

        // The events lead from what was there before to what every moment has.
        let kinds: Vec<&str> = document["kinds"].as_array().unwrap().iter().map(|k| k.as_str().unwrap()).collect();
        let mut live: BTreeMap<&str, u64> = kinds.iter().map(|&k| (k, number(&document["before"][k]))).collect();
        let events = &document["events"];
        let mut event = 0;
        for moment in moments {
            let mut highest = 0;
            for _ in 0..number(&moment["events"]) {
                let bytes = number(&events["bytes"][event]);
                let kind = |end: &str| usize::try_from(events[end][event].as_i64().unwrap()).ok().map(|i| kinds[i]);
                kind("from").into_iter().for_each(|k| *live.get_mut(k).unwrap() -= bytes);
                kind("to").into_iter().for_each(|k| *live.get_mut(k).unwrap() += bytes);
                let apart = ["parameter", "gradient", "optimizer"];
                highest = highest.max(live.iter().filter(|(k, _)| !apart.contains(k)).map(|(_, b)| *b).sum());
                event += 1;
            }
            assert_eq!(highest, number(&moment["highest_bytes"]), "{moment}");
        }
        assert_eq!(event, events["bytes"].as_array().unwrap().len());
        assert_eq!(live["gradient"], live["parameter"], "each parameter has its gradient at the end");
    }
}

#[test]
fn a_timeline_says_what_makes_the_peak() {
    let explicit = |policy: &str| {
        let args = ["timeline", "--json", "--attention", "explicit", "--policy", policy];
        json_lines(&run_small(&args)).remove(0)
    };
    let has = |document: &Value, path: &str, what: &str| {
        let contents = document["contents"].as_array().unwrap();
        assert!(contents.iter().any(|c| c["path"] == path && c["what"] == what), "{what} {path}: {contents:#?}");
    };
    has(&explicit("none"), "transformer.h.0.attn.softmax", "saved");
    has(&explicit("int8_all"), "transformer.h.0.mlp.gelu", "saved as int8");
    let full = explicit("full_per_layer");
    has(&full, "transformer.h.1.attn.softmax", "replayed");
    has(&full, "transformer.h.0", "saved");
    assert_ne!(full["peak"]["phase"], "forward");
}

#[test]
fn a_timeline_takes_the_largest_models() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("timeline.html");
    let args = ["timeline", "--model", "gpt3-175b", "--policy", "full_per_layer", "--out", page.to_str().unwrap()];
    let text = stdout(&run(&args));
    assert!(text.contains("live at the peak") && text.contains("GiB"), "{text}");
    assert!(fs::metadata(&page).unwrap().len() < 8 << 20);
}

#[test]
fn inspect_says_what_two_policies_do_differently() {
    let args =
        ["inspect", "--json", "--attention", "explicit", "--policy", "selective_attention", "--diff", "selective"];
    let document = &json_lines(&run_small(&args))[0];
    let changed = document["changed"].as_array().unwrap();
    for change in changed {
        assert_fields(change, &["path", "from", "to", "bytes", "recompute_flops", "why"]);
    }
    let gelu = changed.iter().find(|c| c["path"] == "transformer.h.1.mlp.gelu").unwrap();
    assert_eq!((&gelu["from"], &gelu["to"]), (&"none".into(), &"recompute".into()));
    assert!(number(&gelu["recompute_flops"]) > 0 && number(&gelu["bytes"]) > 0);
    let why = gelu["why"].as_str().unwrap();
    for words in ["nothing marks it", "rule `selective", "from `transformer.h.1", "read by `transformer.h.1.mlp`"] {
        assert!(why.contains(words), "`{words}` isn't in: {why}");
    }
    assert!(changed.iter().all(|c| !c["path"].as_str().unwrap().ends_with("softmax")), "both drop it");
    // Without a change of its own, what is stored accounts for the change.
    let stored = |policy: &str| {
        let args = ["inspect", "--json", "--attention", "explicit", "--policy", policy];
        number(&json_lines(&run_small(&args))[0]["totals"]["stored_bytes"])
    };
    let sum = |side: &str| changed.iter().map(|c| number(&c[side])).sum::<u64>();
    assert_eq!(
        stored("selective_attention") + sum("to_stored_bytes"),
        stored("selective") + sum("from_stored_bytes"),
        "what isn't listed is stored alike"
    );
}

#[test]
fn a_diff_of_marks_and_of_nothing() {
    let same = &json_lines(&run_small(&["inspect", "--json", "--policy", "selective", "--diff", "selective"]))[0];
    assert_eq!(same["changed"], json!([]));
    let args = ["inspect", "--json", "--policy", "none", "--mark", "blocks.0.mlp.gelu=int8", "--diff", "none"];
    let marked = &json_lines(&run_small(&args))[0];
    let changed = marked["changed"].as_array().unwrap();
    assert_eq!(changed.len(), 1, "{changed:#?}");
    assert_eq!((&changed[0]["from"], &changed[0]["to"]), (&"int8".into(), &"none".into()));
    let table = stdout(&run_small(&["inspect", "--policy", "none", "--diff", "full_per_layer"]));
    assert!(table.contains("transformer.h.*.mlp.gelu") && table.contains("treated differently"), "{table}");
}

#[test]
fn the_frontiers_page_has_the_marks_of_every_block() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["frontier", "--json", "--device", "meta", "--policies", "none,selective,int8_all", "--out"];
    let document = &json_lines(&run_small(&[&args[..], &[dir.path().to_str().unwrap()]].concat()))[0];
    let page = fs::read_to_string(dir.path().join("frontier.html")).unwrap();
    let text = page.split(r#"id="data">"#).nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(text).unwrap();
    assert_eq!(&data["frontier"], document);
    let mark = |point: usize, path: &str| {
        let form = document["points"][point]["attention"].as_str().unwrap();
        let rows = data["rows"][form].as_array().unwrap();
        let row = rows.iter().position(|row| row["path"] == path).unwrap_or_else(|| panic!("no {path}: {rows:#?}"));
        assert_eq!(data["extras"][point]["marks"].as_array().unwrap().len(), rows.len());
        data["extras"][point]["marks"][row].as_str().unwrap().to_owned()
    };
    for (point, line) in document["points"].as_array().unwrap().iter().enumerate() {
        let (gelu, softmax) = match line["policy"].as_str().unwrap() {
            "none" => ("nn", "nn"),
            "selective" => ("rr", "rr"),
            _ => ("ii", "ii"),
        };
        assert_eq!(mark(point, "transformer.h.*.mlp.gelu"), gelu);
        if line["attention"] == "explicit" {
            assert_eq!(mark(point, "transformer.h.*.attn.softmax"), softmax);
        } else {
            // Tiled attention reads its input exactly.
            assert_eq!(mark(point, "transformer.h.*.attn.c_attn"), if gelu == "ii" { "ee" } else { "nn" });
        }
        assert_eq!(mark(point, "transformer.h.*.ln_1.layer_norm#1"), "ee");
        assert_eq!(data["extras"][point]["lossy"], gelu == "ii");
    }
}

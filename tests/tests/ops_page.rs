//! `docs/ops.md` is made from the registry: this fails where it is not what the registry says, and writes it with
//! `RETAPE_BLESS=1`.

use retape_core::DType;
use retape_core::ops::{Op, Sample, Slot, Spec};
use retape_tests::variations::specs;
use std::path::Path;

const HEAD: &str = "\
# Ops

Every op of the registry, made by `RETAPE_BLESS=1 cargo test --release -p retape-tests --test ops_page` from what the
ops say of themselves; the gradient of each is derived at the head of its file. *Backward reads* is what an op saves
where all its inputs need a gradient: `in 0` is its first input, `out` its output, a *statistic* is a number per row
that is kept exactly, and *exactly* means that lossy formats are refused. Views save nothing and cost nothing. FLOPs are
those of one forward run at the inputs in the last column, as the ledger and the policies count them.

| file | op | computes | backward reads | FLOPs | at |
|---|---|---|---|---|---|
";

/// What backward reads of a sample's op.
fn reads(sample: &Sample, specs: &[Spec]) -> String {
    let rule = sample.op.rule();
    let outputs = rule.infer(specs).expect("a sample is valid");
    let needs: Vec<bool> = specs.iter().map(|s| s.dtype.is_float()).collect();
    let several = outputs.iter().filter(|o| !o.statistic).count() > 1;
    let name = |slot| match slot {
        Slot::In(i) => format!("in {i}"),
        Slot::Out(i) if outputs[i].statistic => "a statistic".to_owned(),
        Slot::Out(i) if several => format!("out {i}"),
        Slot::Out(_) => "out".to_owned(),
    };
    let saves = rule.saves(&needs);
    let reads: Vec<String> =
        saves.iter().map(|s| format!("{}{}", name(s.slot), if s.exact { " (exactly)" } else { "" })).collect();
    if reads.is_empty() { "nothing".to_owned() } else { reads.join(", ") }
}

#[test]
fn docs_ops_md_is_what_the_registry_says() {
    let mut page = HEAD.to_owned();
    let mut seen = std::collections::BTreeSet::new();
    for (file, samples) in Op::samples_by_file() {
        for sample in samples {
            let rule = sample.op.rule();
            if !seen.insert(rule.name()) {
                continue;
            }
            assert!(!rule.formula().is_empty(), "{} has no formula", rule.name());
            let mut specs = specs(&sample);
            specs.iter_mut().filter(|s| s.dtype == DType::F64).for_each(|s| s.dtype = DType::F32);
            let flops = rule.cost(&specs, &rule.infer(&specs).expect("a sample is valid")).flops;
            let at: Vec<String> = specs.iter().map(Spec::to_string).collect();
            // A bar would end the cell.
            let formula = rule.formula().replace('|', "\\|");
            let link = format!("[{file}](../crates/core/src/ops/{file}.rs)").replace("where_]", "where]");
            let (name, reads, at) = (rule.name(), reads(&sample, &specs), at.join(", "));
            page += &format!("| {link} | `{name}` | {formula} | {reads} | {flops} | {at} |\n");
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ops.md");
    if std::env::var_os("RETAPE_BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == page, "docs/ops.md is not what the registry says; run this test with RETAPE_BLESS=1");
}

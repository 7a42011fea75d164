//! What every preset says of every value of a transformer, and how presets are named.

mod common;

use common::{Place, mark_of, mark_of_path};
use retape_core::{DType, DecidedBy, EntryMark, Ledger, LedgerEntry, Mark, Origin, Policy, Role, Roles, Site};
use retape_policy::{ModelShape, PRESETS, parse, presets};
use std::collections::HashSet;

const SHAPE: ModelShape = ModelShape { blocks: 6 };
const KEEP: Option<&str> = Some("keep");
const RECOMPUTE: Option<&str> = Some("recompute");
const INT8: Option<&str> = Some("int8");

/// FLOPs and traffic of ops bound by memory and by arithmetic.
const MEMORY: (u64, u64) = (1 << 20, 1 << 21);
const ARITHMETIC: (u64, u64) = (1 << 30, 1 << 21);

/// Path, op, shape, and what computing it costs.
type Value = (&'static str, &'static str, &'static [usize], (u64, u64));

const VALUES: &[Value] = &[
    ("embed", "add", &[2, 256, 64], MEMORY),
    ("blocks.0.ln_1", "layer_norm", &[2, 256, 64], MEMORY),
    ("blocks.0.attn.c_attn", "linear", &[2, 256, 192], ARITHMETIC),
    ("blocks.0.attn.scores", "matmul", &[2, 4, 256, 256], ARITHMETIC),
    ("blocks.0.attn.scale", "scale", &[2, 4, 256, 256], MEMORY),
    ("blocks.0.attn.causal_mask", "causal_mask", &[2, 4, 256, 256], MEMORY),
    ("blocks.0.attn.softmax", "softmax", &[2, 4, 256, 256], MEMORY),
    ("blocks.0.attn.dropout", "dropout", &[2, 4, 256, 256], MEMORY),
    ("blocks.0.attn.context", "matmul", &[2, 4, 256, 16], ARITHMETIC),
    ("blocks.0.attn.merge", "contiguous", &[2, 256, 64], MEMORY),
    ("blocks.0.attn.attention", "attention", &[2, 256, 4, 16], ARITHMETIC),
    ("blocks.0.attn.c_proj.linear", "linear", &[2, 256, 64], ARITHMETIC),
    ("blocks.0.attn", "linear", &[2, 256, 64], ARITHMETIC),
    ("blocks.0.add", "add", &[2, 256, 64], MEMORY),
    ("blocks.0.ln_2", "layer_norm", &[2, 256, 64], MEMORY),
    ("blocks.0.mlp.c_fc", "linear", &[2, 256, 256], ARITHMETIC),
    ("blocks.0.mlp.gelu", "gelu_tanh", &[2, 256, 256], MEMORY),
    ("blocks.0.mlp", "linear", &[2, 256, 64], ARITHMETIC),
    ("blocks.0", "add", &[2, 256, 64], MEMORY),
    ("blocks.2", "add", &[2, 256, 64], MEMORY),
    ("ln_f", "layer_norm", &[2, 256, 64], MEMORY),
    ("lm_head", "linear", &[2, 256, 1000], ARITHMETIC),
    ("loss", "cross_entropy", &[], MEMORY),
];

const QUADRATIC: [&str; 5] = ["scores", "scale", "causal_mask", "softmax", "dropout"];

fn quadratic(path: &str) -> bool {
    QUADRATIC.iter().any(|name| path == format!("blocks.0.attn.{name}"))
}

/// A matmul of four dimensions too; nothing reads it but `merge`, so it isn't stored in any case.
fn context(path: &str) -> bool {
    path == "blocks.0.attn.context"
}

fn hidden(path: &str) -> bool {
    matches!(path, "blocks.0.mlp.c_fc" | "blocks.0.mlp.gelu")
}

fn norm(path: &str) -> bool {
    matches!(path, "blocks.0.ln_1" | "blocks.0.ln_2")
}

fn recompute_if(condition: bool) -> Option<&'static str> {
    condition.then_some("recompute")
}

/// The mark that a preset must give, written out once more in another form.
fn expected(spec: &str, site: &Site<'_>) -> Option<&'static str> {
    let path = site.path;
    let inside = path.starts_with("blocks.0.");
    match spec {
        "none" | "length_adaptive" | "length_adaptive:threshold=256" => None,
        "full_per_layer" => recompute_if(inside),
        "length_adaptive:threshold=255" => recompute_if(quadratic(path)),
        "selective_attention" => recompute_if(quadratic(path) || context(path)),
        "selective_ffn" | "flash_ffn" => recompute_if(hidden(path)),
        "selective" => recompute_if(quadratic(path) || context(path) || hidden(path) || norm(path)),
        "int8_residual" => matches!(path, "embed" | "blocks.0" | "blocks.2" | "blocks.0.add").then_some("int8"),
        "int8_all" => INT8,
        "balanced" if site.op == "add" => KEEP,
        "balanced" => recompute_if((site.flops, site.traffic) == MEMORY),
        "sqrt_n" if path == "blocks.2" => KEEP,
        "sqrt_n" => recompute_if(inside || path == "blocks.0"),
        other => panic!("no expectation for {other}"),
    }
}

#[test]
fn marks() {
    let defaults = PRESETS.iter().map(|p| p.name);
    for spec in defaults.chain(["length_adaptive:threshold=255", "length_adaptive:threshold=256"]) {
        let policy = parse(spec, &SHAPE).expect(spec);
        for &(path, op, shape, (flops, traffic)) in VALUES {
            let site = Site { flops, traffic, ..Place::new(path).value(op, shape) };
            let mark = policy.mark(&site).map(|decision| decision.mark.name());
            assert_eq!(mark, expected(spec, &site), "{spec} on {path}");
        }
    }
}

#[test]
fn every_rule_of_a_preset_decides_for_a_value() {
    for preset in PRESETS {
        let policy = parse(preset.name, &ModelShape { blocks: 3 }).unwrap();
        let long = [2, 4, 4096, 4096];
        let used: HashSet<_> = VALUES
            .iter()
            .map(|&(path, op, shape, (flops, traffic))| {
                let shape = if quadratic(path) { &long[..] } else { shape };
                Site { flops, traffic, ..Place::new(path).value(op, shape) }
            })
            .chain([Place::new("blocks.1").value("add", &[2, 256, 64])])
            .chain([Place::new("blocks.1.attn.scores").value("matmul", &long)])
            .filter_map(|site| policy.mark(&site))
            .map(|decision| decision.rule)
            .collect();
        assert_eq!(used.len(), policy.rules().len(), "{}", preset.name);
        for rule in policy.rules() {
            assert_eq!(rule.origin, Origin::Preset);
            assert!(rule.name.starts_with(&format!("{}: ", preset.name)), "{}", rule.name);
        }
    }
}

#[test]
fn blocks_may_lie_in_other_scopes() {
    for (spec, path, mark) in [
        ("full_per_layer", "encoder.blocks.0.add", RECOMPUTE),
        ("full_per_layer", "encoder.blocks.0", None),
        ("full_per_layer", "transformer.h.0.attn", RECOMPUTE),
        ("full_per_layer", "transformer.h.0", None),
        ("full_per_layer", "blocks.first.add", None),
        ("selective", "encoder.blocks.0.mlp.gelu", RECOMPUTE),
        ("selective", "mlp.gelu", RECOMPUTE),
        ("int8_residual", "gpt.embed", INT8),
        ("int8_residual", "layers.0", INT8),
        ("sqrt_n", "encoder.blocks.2", KEEP),
        ("sqrt_n", "transformer.h.2", KEEP),
        ("sqrt_n", "layers.1", RECOMPUTE),
        // What isn't a block may have its name.
        ("sqrt_n", "blocks.first.add", RECOMPUTE),
    ] {
        assert_eq!(mark_of_path(&parse(spec, &SHAPE).unwrap(), path), mark, "{spec} on {path}");
    }
}

#[test]
fn segments_of_sqrt_n() {
    for (every, blocks, kept) in [(1, 3, &[0, 1, 2][..]), (2, 4, &[1, 3]), (3, 8, &[2, 5]), (9, 8, &[]), (0, 2, &[])] {
        let policy = presets::sqrt_n(every, blocks);
        for block in 0..blocks {
            let expected = if kept.contains(&block) { KEEP } else { RECOMPUTE };
            assert_eq!(mark_of_path(&policy, &format!("blocks.{block}")), expected, "{every} of {blocks}, {block}");
        }
    }
    for (blocks, every) in [(0, 1), (1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4), (96, 10)] {
        let default = format!("{:?}", parse("sqrt_n", &ModelShape { blocks }).unwrap());
        assert_eq!(default, format!("{:?}", presets::sqrt_n(every, blocks)), "{blocks} blocks");
    }
    let many = presets::sqrt_n(1, 100_000);
    for block in [0, 4095, 4096, 99_999] {
        assert_eq!(mark_of_path(&many, &format!("blocks.{block}")), KEEP, "{block}");
    }
    let policy = presets::sqrt_n(2, 4);
    for scope in ["blocks.3", "decoder.blocks.0", "transformer.h.3", "blocks.first"] {
        assert!(policy.is_segment(&Place::new(scope).scope()), "{scope}");
        assert!(!presets::full_per_layer().is_segment(&Place::new(scope).scope()), "{scope}");
    }
    for scope in ["blocks", "blocks.3.attn", "ln_f", "transformer.h"] {
        assert!(!policy.is_segment(&Place::new(scope).scope()), "{scope}");
    }
}

#[test]
fn groups_of_int8() {
    for name in ["int8_residual", "int8_all"] {
        for (spec, group) in [(name.to_owned(), 64), (format!("{name}:group=32"), 32)] {
            let mark = mark_of(&parse(&spec, &SHAPE).unwrap(), &Place::new("embed").value("add", &[8, 64]));
            assert!(matches!(mark, Some(Mark::Int8(int8)) if int8.group == group), "{spec}: {mark:?}");
        }
    }
}

#[test]
fn flash_ffn_warns_of_explicit_attention() {
    let entry = |path: &str, op, role: Option<Role>| LedgerEntry {
        id: 0,
        path: path.to_owned(),
        op,
        roles: Roles::from(role),
        shape: vec![2, 4, 8, 8],
        dtype: DType::F32,
        bytes: 0,
        stored_bytes: 0,
        mark: EntryMark::Unmarked,
        rule: DecidedBy::Default,
        readers: Vec::new(),
        recompute_flops: 0,
        depth: 0,
        replayed_from: Vec::new(),
        quantization_error: None,
        held_by_handle: false,
    };
    let lint = |policy: &dyn Policy, path: &str, op| {
        let role = path.contains(".attn.").then_some(Role::Attention);
        policy.lint(&Ledger { values: vec![entry(path, op, role)], ..Ledger::default() })
    };
    let flash = presets::flash_ffn();
    assert_eq!(
        lint(&flash, "blocks.0.attn.softmax", "softmax").iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["meant-for-tiled-attention (flash_ffn): this model has explicit attention (`blocks.0.attn.softmax`), whose \
             quadratic values are kept; build it with tiled attention, or use selective"]
    );
    assert!(lint(&flash, "blocks.0.attn.attention", "attention").is_empty());
    assert!(lint(&flash, "router.softmax", "softmax").is_empty());
    assert!(lint(&presets::selective_ffn(), "blocks.0.attn.softmax", "softmax").is_empty());
    let composed = presets::int8_residual(Default::default()).then(flash);
    assert_eq!(lint(&composed, "blocks.0.attn.softmax", "softmax").len(), 1);
}

#[test]
fn wrong_names_and_arguments() {
    let all = "none, full_per_layer, selective_attention, selective_ffn, selective, flash_ffn, length_adaptive, \
               int8_residual, int8_all, balanced, sqrt_n";
    let unknown = |name: &str, hint: &str| {
        format!("unknown policy `{name}`{hint}; the presets are {all}; a policy may also be the path of a .toml file")
    };
    for (spec, message) in [
        ("selctive", unknown("selctive", ", did you mean `selective`?")),
        ("sel", unknown("sel", ", did you mean `selective`?")),
        ("length-adaptive:threshold=1", unknown("length-adaptive", ", did you mean `length_adaptive`?")),
        ("everything", unknown("everything", "")),
        ("", unknown("", "")),
        ("none:x=1", "policy `none`, argument `x=1`: this policy takes no arguments".to_owned()),
        (
            "length_adaptive:2048",
            "policy `length_adaptive`, argument `2048`: this policy takes threshold=2048 (the default)".to_owned(),
        ),
        ("sqrt_n:n=2", "policy `sqrt_n`, argument `n=2`: this policy takes every=3 (the default)".to_owned()),
        (
            "int8_all:group=0",
            "policy `int8_all`, argument `group=0`: write group=N with a whole number N >= 1".to_owned(),
        ),
        (
            "length_adaptive:threshold=2k",
            "policy `length_adaptive`, argument `threshold=2k`: write threshold=N with a whole number N >= 0"
                .to_owned(),
        ),
        ("sqrt_n:every=2:every=3", "policy `sqrt_n`, argument `every=3`: is given twice".to_owned()),
    ] {
        assert_eq!(parse(spec, &SHAPE).expect_err(spec).to_string(), message);
    }
}

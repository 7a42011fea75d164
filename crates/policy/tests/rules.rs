//! Rules, sets of them, and files of them.

mod common;

use common::{Place, mark_of, mark_of_path, site};
use retape_core::{Int8Spec, Mark, Origin, Policy, Role};
use retape_policy::{ModelShape, Rule, RuleSet, parse, presets};

const SHAPE: ModelShape = ModelShape { blocks: 4 };

fn rule(pattern: &str) -> Rule {
    Rule::new(pattern, Mark::Recompute).unwrap()
}

fn matches(rule: &Rule, op: &'static str, shape: &[usize]) -> bool {
    mark_of(&RuleSet::new([rule.clone()]), &site("blocks.0.mlp.gelu", op, shape)).is_some()
}

#[test]
fn predicates() {
    let any = || rule("**");
    let shape = |dims: &[&'static str]| any().shape(dims.iter().copied()).unwrap();
    for (rule, inside, outside) in [
        (any().min_bytes(64), &[&[16][..], &[17]][..], &[&[15][..], &[]][..]),
        (any().max_bytes(64), &[&[16], &[0]], &[&[17]]),
        (any().rank(2), &[&[1, 2]], &[&[1], &[1, 2, 3]]),
        (any().rank(0), &[&[]], &[&[1]]),
        (shape(&["*", ">=1024"]), &[&[1, 1024], &[7, 8, 2000]], &[&[1, 1023], &[1024], &[1024, 1]]),
        (shape(&["<4", "8"]), &[&[3, 8], &[9, 0, 8]], &[&[4, 8], &[3, 9]]),
        (shape(&["> 4"]), &[&[5]], &[&[4]]),
        (shape(&["<=4"]), &[&[4]], &[&[5]]),
        (shape(&["<0"]), &[], &[&[0]]),
        (shape(&[">18446744073709551615"]), &[], &[&[3]]),
        (shape(&[]).rank(1).min_bytes(8), &[&[2]], &[&[1], &[1, 2]]),
    ] {
        for shape in inside {
            assert!(matches(&rule, "gelu", shape), "{rule} must match {shape:?}");
        }
        for shape in outside {
            assert!(!matches(&rule, "gelu", shape), "{rule} must not match {shape:?}");
        }
    }
    let by_op = any().op("{gelu*,relu}").unwrap();
    assert!(matches(&by_op, "gelu_tanh", &[2]) && matches(&by_op, "relu", &[2]) && !matches(&by_op, "linear", &[2]));
    // `site` has half a FLOP per byte of traffic.
    assert!(matches(&any().max_intensity(0.5), "gelu", &[2]) && !matches(&any().max_intensity(0.4), "gelu", &[2]));
}

/// By roles, and by the numbers of blocks whatever their names.
#[test]
fn roles_and_blocks() {
    let by_role = rule("**").role(Role::Attention);
    let by_both = rule("**").role(Role::Block).role(Role::Attention);
    let by_output = rule("**").output_of(Role::Block);
    let of_blocks = |pattern| rule(pattern);
    for (rule, inside, outside) in [
        (by_role, &["h.0.attn.softmax", "attn.q"][..], &["h.0.attn", "h.0.mlp.gelu", "softmax"][..]),
        (by_both, &["h.0.attn.softmax"], &["attn.q", "h.0.add"]),
        (by_output, &["h.0", "gpt.h.11"], &["h.0.add", "add"]),
        (of_blocks("blocks.*.mlp.*"), &["gpt.h.3.mlp.gelu", "blocks.0.mlp.gelu"], &["gpt.h.3.mlp", "mlp.gelu"]),
        (of_blocks("**.blocks.3.**"), &["gpt.h.3.mlp.gelu", "blocks.3.add"], &["gpt.h.13.add", "gpt.h.3"]),
        (of_blocks("enc.h.blocks.3"), &["enc.h.3"], &["dec.h.3", "h.3"]),
        (of_blocks("blocks.1.{a,b}"), &["s.0.h.1.a", "s.1.h.0.h.1.b"], &["s.1.h.0.a"]),
        (of_blocks("s.blocks.0.h.1.a"), &["s.0.h.1.a"], &["s.1.h.1.a"]),
        // By its own name too.
        (of_blocks("gpt.h.3"), &["gpt.h.3"], &["gpt.h.blocks.3"]),
    ] {
        let policy = RuleSet::new([rule.clone()]);
        for (paths, mark) in [(inside, Some("recompute")), (outside, None)] {
            for path in paths {
                assert_eq!(mark_of_path(&policy, path), mark, "{rule} on {path}");
            }
        }
    }
    let text = "blocks.*=int8 where role=block, output_of=feed_forward, op=add, rank=2";
    assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
    let message = "a=keep where role=mlp".parse::<Rule>().unwrap_err().to_string();
    let roles = "block, attention, feed_forward, norm, embedding, head";
    assert_eq!(message, format!("rule `a`: `mlp` is no role; the roles are {roles}"));
    let file =
        "[[rule]]\nrole = 'attention'\nmark = 'keep'\n[[rule]]\noutput_of = 'block'\npath = 'h.*'\nmark = 'int8'";
    let file = RuleSet::from_toml(file, &SHAPE).unwrap();
    let names: Vec<_> = file.rules().iter().map(|r| r.name.as_str()).collect();
    assert_eq!(
        names,
        ["[[rule]] number 1: **=keep where role=attention", "[[rule]] number 2: h.*=int8 where output_of=block"]
    );
    let segments = RuleSet::from_toml("segments = ['blocks.1']", &SHAPE).unwrap();
    for (scope, is_segment) in [("gpt.h.1", true), ("gpt.h.0", false), ("gpt.h.1.attn", false), ("blocks.1", true)] {
        assert_eq!(segments.is_segment(&Place::new(scope).scope()), is_segment, "{scope}");
    }
}

#[test]
fn the_first_match_decides_and_users_come_before_presets() {
    let keep = Rule::new("blocks.0.**", Mark::Keep).unwrap();
    let int8: Rule = "blocks.*.mlp.*=int8".parse().unwrap();
    let policy = RuleSet::new([keep, int8]).then(presets::full_per_layer());
    for (path, mark, rule) in
        [("blocks.0.mlp.gelu", "keep", 0), ("blocks.1.mlp.gelu", "int8", 1), ("blocks.1.attn.softmax", "recompute", 2)]
    {
        let decision = policy.mark(&Place::new(path).value("gelu", &[2])).unwrap();
        assert_eq!((decision.mark.name(), decision.rule), (mark, rule), "{path}");
    }
    assert_eq!(policy.mark(&site("embed", "add", &[2])), None);
    let infos: Vec<_> = policy.rules().iter().map(|r| (r.name.as_str(), r.origin)).collect();
    assert_eq!(
        infos,
        [
            ("blocks.0.**=keep", Origin::User),
            ("blocks.*.mlp.*=int8", Origin::User),
            ("full_per_layer: **=recompute where role=block", Origin::Preset),
        ]
    );
}

#[test]
fn wrong_rules() {
    let message = |result: retape_policy::Result<Rule>| result.unwrap_err().to_string();
    let dim = |text| message(rule("a.*").shape([text]));
    assert_eq!(
        message(Rule::new("blocks.[0", Mark::Keep)),
        "rule `blocks.[0`: the pattern `blocks.[0` can't be read: unclosed character class; missing ']'"
    );
    assert_eq!(
        message(rule("blocks.*").op("{gelu")),
        "rule `blocks.*`: the pattern `{gelu` can't be read: unclosed alternate group; missing '}' (maybe escape '{' \
         with '[{]'?)"
    );
    for text in ["", "**", "*4", "=4", "4<", "x", "<", ">=-1", "99999999999999999999"] {
        let expected =
            format!("rule `a.*`: `{text}` does not constrain a dimension; write *, 64, <64, <=64, >64 or >=64");
        assert_eq!(dim(text), expected);
    }
    assert_eq!(message("a.*=int4".parse()), "unknown mark `int4`; the marks are keep, recompute, int8 and bf16");
    assert_eq!(
        message("a.*".parse()),
        "rule `a.*`: has no mark; write GLOB=MARK, where the marks are keep, recompute, int8 and bf16"
    );
    for (text, reason) in [
        ("a=int8:group=0", "write int8:group=N with a whole number N >= 1"),
        ("a=int8:gruop=8", "int8 takes group=N and rounding=nearest or rounding=stochastic"),
        ("a=bf16:group=8", "`bf16` takes no arguments; leave out `group`"),
        ("a=keep:rounding=nearest where rank=2", "`keep` takes no arguments; leave out `rounding`"),
    ] {
        assert_eq!(message(text.parse()), format!("rule `{text}`: {reason}"));
    }
}

const FILE: &str = r#"
    preset = "length_adaptive:threshold=1024"

    [[rule]]
    path = "blocks.*.mlp.*"
    mark = "int8"
    group = 32
    op = "gelu*"
    min_bytes = "1KiB"
    max_bytes = 4096
    rank = 2
    shape = ["*", ">=16", ]
    max_intensity = 8

    [[rule]]
    path = "embed"
    mark = "keep"
    shape = [64]
"#;

#[test]
fn a_file_of_rules() {
    let policy = RuleSet::from_toml(FILE, &SHAPE).unwrap();
    let names: Vec<_> = policy.rules().iter().map(|r| r.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "[[rule]] number 1: blocks.*.mlp.*=int8:group=32 where op=gelu*, bytes>=1024, bytes<=4096, rank=2, \
             shape=[*, >=16], intensity<=8",
            "[[rule]] number 2: embed=keep where shape=[64]",
            "length_adaptive: **=recompute where role=attention, op={softmax,dropout,scale,causal_mask,where}, \
             shape=[*, >1024]",
            "length_adaptive: **=recompute where role=attention, op={matmul,add}, shape=[*, *, *, >1024]",
        ]
    );
    assert_eq!(
        mark_of(&policy, &site("blocks.0.mlp.gelu", "gelu", &[16, 16])),
        Some(Mark::Int8(Int8Spec { group: 32, ..Int8Spec::default() }))
    );
    assert_eq!(mark_of(&policy, &site("embed", "add", &[8, 64])), Some(Mark::Keep));
    assert_eq!(
        mark_of(&policy, &Place::new("blocks.0.attn.softmax").value("softmax", &[1025, 1025])),
        Some(Mark::Recompute)
    );
    assert!(RuleSet::from_toml("", &SHAPE).unwrap().rules().is_empty());
}

/// Every mark in a rule's text, in a file, and in a preset's place.
#[test]
fn every_mark_has_its_rules() {
    let stochastic = "int8:rounding=stochastic".parse().unwrap();
    for mark in Mark::all().chain([stochastic]) {
        let text = format!("blocks.*.mlp.*={} where op=gelu*, bytes>=64", mark.text());
        let rule: Rule = text.parse().unwrap();
        assert_eq!((rule.mark(), rule.to_string()), (mark, text));
        let arguments = mark.format().map_or(Vec::new(), |format| format.arguments());
        let arguments: String = arguments.iter().map(|(name, value)| format!("{name} = '{value}'\n")).collect();
        let file = format!("[[rule]]\npath = 'blocks.*.mlp.*'\nmark = '{mark}'\n{arguments}op = 'gelu*'");
        let file = RuleSet::from_toml(&file, &SHAPE).unwrap();
        for (policy, what) in [(RuleSet::new([rule]), "text"), (file, "file")] {
            let of = |path, op| mark_of(&policy, &Place::new(path).value(op, &[16, 16]));
            assert_eq!(of("blocks.0.mlp.gelu", "gelu"), Some(mark), "{what}");
            assert_eq!(of("blocks.0.mlp.add", "add"), None, "{what}");
        }
    }
}

#[test]
fn a_policy_may_be_the_path_of_a_file() {
    let path = format!("{}/rules.toml", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&path, FILE).unwrap();
    assert_eq!(mark_of_path(&parse(&path, &SHAPE).unwrap(), "blocks.0.mlp.gelu"), None);
    assert_eq!(parse(&path, &SHAPE).unwrap().rules().len(), 4);
    std::fs::write(&path, "preset = 'selectve'").unwrap();
    let message = parse(&path, &SHAPE).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{path}: unknown policy `selectve`, did you mean `selective`?")), "{message}");
    let message = parse("no/such.toml", &SHAPE).unwrap_err().to_string();
    assert!(message.starts_with("no/such.toml: can't read the rules: "), "{message}");
}

#[test]
fn wrong_files() {
    let keys = "the keys of every rule are path, role, output_of, mark, ids, op, min_bytes, max_bytes, rank, shape, \
                max_intensity";
    let second = |text: &str| format!("[[rule]]\npath='a'\nmark='keep'\n[[rule]]\n{text}");
    let in_second = |reason: &str| format!("[[rule]] number 2: {reason}");
    for (text, message) in [
        ("x = 1".to_owned(), "line 1: unknown field `x`, expected one of `preset`, `segments`, `rule`".to_owned()),
        ("\npreset = 3".to_owned(), "line 2: invalid type: integer `3`, expected a string".to_owned()),
        (
            second("path='b'\nmark='keep'\nmin_byte=3"),
            in_second(&format!("`min_byte`: `keep` takes no arguments; leave out `min_byte`; {keys}")),
        ),
        (
            second("mark='keep'"),
            in_second("has none of `path`, `role`, `output_of` and `ids`; write the pattern of the values it is for"),
        ),
        (second("path='b'"), in_second("missing field `mark`")),
        (
            second("role='mlp'\nmark='keep'"),
            in_second("`mlp` is no role; the roles are block, attention, feed_forward, norm, embedding, head"),
        ),
        (second("mark='keep'\nids=[]"), in_second("`ids` is empty; leave it out, or list numbers")),
        (
            second("path='b'\nmark='recomput'"),
            in_second("unknown mark `recomput`; the marks are keep, recompute, int8 and bf16"),
        ),
        (
            second("path='b'\nmark='bf16'\ngroup=32"),
            in_second(&format!("`group`: `bf16` takes no arguments; leave out `group`; {keys}")),
        ),
        (
            second("path='b'\nmark='int8'\ngroup=0"),
            in_second(&format!("`group`: write int8:group=N with a whole number N >= 1; {keys}")),
        ),
        (
            second("path='b'\nmark='int8'\nrounding='up'"),
            in_second(&format!("`rounding`: write int8:rounding=nearest or int8:rounding=stochastic; {keys}")),
        ),
        (
            second("path='b/c'\nmark='keep'"),
            in_second("rule `b/c`: the pattern `b/c` contains `/`; segments are separated by `.`"),
        ),
        (
            second("path='b'\nmark='keep'\nmin_bytes='1 Mib1'"),
            in_second("`1 Mib1` is not a byte size; write it like 512MiB, 1.5GB or 4096"),
        ),
        (second("path='b'\nmark='keep'\nmin_bytes=-1"), in_second("expected a number that is not negative, or text")),
        (
            second("path='b'\nmark='keep'\nshape=['~4']"),
            in_second("rule `b`: `~4` does not constrain a dimension; write *, 64, <64, <=64, >64 or >=64"),
        ),
    ] {
        assert_eq!(RuleSet::from_toml(&text, &SHAPE).expect_err(&text).to_string(), message);
    }
    let syntax = RuleSet::from_toml("[[rule]]\npath = ", &SHAPE).unwrap_err().to_string();
    assert!(syntax.starts_with("line 2: ") && !syntax.contains('\n'), "{syntax}");
}

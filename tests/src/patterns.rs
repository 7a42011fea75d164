//! Patterns and rules, against a matcher that is slow and plain: a pattern is a tree, tried in every way it can match.

use crate::choices::Choices;
use retape_core::{BlockScope, DType, Mark, Policy, Role, Roles, ScopeSite, Site};
use retape_policy::{ModelShape, Rule, RuleSet, parse};

/// A part of a segment.
#[derive(Debug, Clone)]
enum Part {
    Letter(char),
    Any,
    Star,
    Class { negated: bool, ranges: Vec<(char, char)> },
    Either(Vec<Vec<Part>>),
}

/// One segment of a pattern.
#[derive(Debug, Clone)]
enum Segment {
    /// `**`
    Stars,
    Parts(Vec<Part>),
}

/// A pattern as a tree: alternatives of segments.
#[derive(Debug, Clone)]
pub struct Pattern(Vec<Vec<Segment>>);

const LETTERS: &[char] = &['a', 'b', '0', '1', '_', 'é'];
const ASCII: &[char] = &['a', 'b', '0', '1', '_'];

fn parts(choices: &mut impl Choices, depth: usize) -> Vec<Part> {
    let mut parts = Vec::new();
    for _ in 0..=choices.throw(3) {
        parts.push(match choices.throw(if depth == 0 { 9 } else { 6 }) {
            0..=2 => Part::Letter(choices.pick(LETTERS)),
            3 => Part::Any,
            4 if !matches!(parts.last(), Some(Part::Star)) => Part::Star,
            4 | 5 => {
                let range = |choices: &mut _| {
                    let (a, b) = (Choices::pick(choices, ASCII), Choices::pick(choices, ASCII));
                    (a.min(b), a.max(b))
                };
                let ranges = (0..=choices.throw(2)).map(|_| range(choices)).collect();
                Part::Class { negated: choices.throw(2) == 1, ranges }
            }
            _ => Part::Either((0..=choices.throw(3)).map(|_| self::parts(choices, depth + 1)).collect()),
        });
    }
    parts
}

impl Pattern {
    /// Any pattern.
    pub fn any(choices: &mut impl Choices) -> Pattern {
        let alternatives = if choices.throw(5) == 4 { 2 } else { 1 };
        let segments = |choices: &mut _| {
            let mut segments = Vec::new();
            for _ in 0..=Choices::throw(choices, 4) {
                let stars = Choices::throw(choices, 4) == 3;
                segments.push(if stars { Segment::Stars } else { Segment::Parts(parts(choices, 0)) });
            }
            // A whole alternative can't be `**`, nor several of them.
            if alternatives > 1 && segments.iter().all(|s| matches!(s, Segment::Stars)) {
                segments = vec![Segment::Parts(parts(choices, 0))];
            }
            segments
        };
        Pattern((0..alternatives).map(|_| segments(choices)).collect())
    }

    /// As users write it.
    pub fn text(&self) -> String {
        let segment = |segment: &Segment| match segment {
            Segment::Stars => "**".to_owned(),
            Segment::Parts(parts) => text_of(parts),
        };
        let alternative = |segments: &Vec<Segment>| segments.iter().map(segment).collect::<Vec<_>>().join(".");
        let alternatives: Vec<String> = self.0.iter().map(alternative).collect();
        if alternatives.len() == 1 { alternatives[0].clone() } else { format!("{{{}}}", alternatives.join(",")) }
    }

    /// Whether it matches a path, by trying everything.
    pub fn matches(&self, path: &str) -> bool {
        let path: Vec<&[u8]> = path.split('.').map(str::as_bytes).collect();
        self.0.iter().any(|segments| segments_match(segments, &path))
    }
}

fn text_of(parts: &[Part]) -> String {
    let text = |part: &Part| match part {
        Part::Letter(letter) => letter.to_string(),
        Part::Any => "?".to_owned(),
        Part::Star => "*".to_owned(),
        Part::Class { negated, ranges } => {
            let ranges: String = ranges.iter().map(|(a, b)| format!("{a}-{b}")).collect();
            format!("[{}{ranges}]", if *negated { "!" } else { "" })
        }
        Part::Either(of) => format!("{{{}}}", of.iter().map(|p| text_of(p)).collect::<Vec<_>>().join(",")),
    };
    parts.iter().map(text).collect()
}

fn segments_match(pattern: &[Segment], path: &[&[u8]]) -> bool {
    match pattern {
        [] => path.is_empty(),
        // At the end at least one; elsewhere any number.
        [Segment::Stars] => !path.is_empty(),
        [Segment::Stars, rest @ ..] => (0..=path.len()).any(|skipped| segments_match(rest, &path[skipped..])),
        [Segment::Parts(parts), rest @ ..] => {
            path.split_first().is_some_and(|(first, others)| parts_match(parts, first, rest, others))
        }
    }
}

/// `?` and classes are one byte each.
fn parts_match(parts: &[Part], letters: &[u8], rest: &[Segment], path: &[&[u8]]) -> bool {
    let Some((part, parts)) = parts.split_first() else {
        return letters.is_empty() && segments_match(rest, path);
    };
    let one = |accepts: &dyn Fn(u8) -> bool| {
        letters.split_first().is_some_and(|(&first, letters)| accepts(first) && parts_match(parts, letters, rest, path))
    };
    match part {
        Part::Letter(letter) => letters
            .strip_prefix(letter.to_string().as_bytes())
            .is_some_and(|letters| parts_match(parts, letters, rest, path)),
        Part::Any => one(&|_| true),
        Part::Star => (0..=letters.len()).any(|skipped| parts_match(parts, &letters[skipped..], rest, path)),
        Part::Class { negated, ranges } => {
            one(&|c| ranges.iter().any(|(a, b)| (*a..=*b).contains(&(c as char))) != *negated)
        }
        Part::Either(of) => {
            of.iter().any(|first| parts_match(&[first.as_slice(), parts].concat(), letters, rest, path))
        }
    }
}

/// Any path.
pub fn any_path(choices: &mut impl Choices) -> String {
    let segment = |choices: &mut _| -> String {
        (0..=Choices::throw(choices, 3)).map(|_| Choices::pick(choices, LETTERS)).collect()
    };
    (0..=choices.throw(4)).map(|_| segment(choices)).collect::<Vec<_>>().join(".")
}

fn site<'a>(path: &'a str, op: &'static str, shape: &'a [usize], flops: u64) -> Site<'a> {
    let bytes = 4 * shape.iter().product::<usize>() as u64;
    Site {
        id: 0,
        path,
        op,
        roles: Roles::NONE,
        output_of: Roles::NONE,
        blocks: &[],
        output: 0,
        shape,
        dtype: DType::F32,
        bytes,
        flops,
        traffic: 2 * bytes,
    }
}

/// Any roles.
fn any_roles(choices: &mut impl Choices) -> Roles {
    Role::ALL.into_iter().filter(|_| choices.throw(2) == 1).collect()
}

/// Any of the blocks that a path may go through, with the names by which patterns know the path.
fn any_blocks(choices: &mut impl Choices, path: &str) -> (Vec<BlockScope>, Vec<String>) {
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
    let ends: Vec<usize> = ends.filter(|_| choices.throw(3) == 2).collect();
    let blocks: Vec<BlockScope> = ends.into_iter().map(|end| BlockScope { end, index: choices.throw(3) }).collect();
    let segments: Vec<&str> = path.split('.').collect();
    let mut names = vec![path.to_owned()];
    for &BlockScope { end, index } in &blocks {
        let block = path[..end].split('.').count();
        let index = index.to_string();
        let from = |start: usize| {
            let mut name = segments[start..block - 1].to_vec();
            if name.last() != Some(&"blocks") {
                name.push("blocks");
            }
            name.push(&index);
            name.extend(&segments[block..]);
            name.join(".")
        };
        names.extend([from(block - 1), from(0)]);
    }
    // Its number stands for a block that is called `blocks.N`.
    let is_numbered = |b: &BlockScope| path[..b.end].split('.').rev().nth(1) == Some("blocks");
    if blocks.iter().any(is_numbered) {
        names.remove(0);
    }
    (blocks, names)
}

/// A pattern matches the paths that the plain matcher says, by their names or by the numbers of their blocks.
pub fn globs(choices: &mut impl Choices) {
    let pattern = Pattern::any(choices);
    let text = pattern.text();
    let rules = RuleSet::new([Rule::new(&text, Mark::Recompute).unwrap_or_else(|e| panic!("{text}: {e}"))]);
    for _ in 0..6 {
        let path = any_path(choices);
        let (blocks, names) = any_blocks(choices, &path);
        let value = Site { blocks: &blocks, ..site(&path, "add", &[], 0) };
        let scope = ScopeSite { path: &path, role: None, blocks: &blocks };
        for actual in [value.names().collect::<Vec<_>>(), scope.names().collect()] {
            assert!(actual.iter().all(|name| names.contains(name)), "{actual:?} of `{path}`, {names:?}");
            assert!(names.iter().all(|name| actual.contains(name)), "{actual:?} of `{path}`, {names:?}");
        }
        let matches = rules.mark(&value).is_some();
        let expected = names.iter().any(|name| pattern.matches(name));
        assert_eq!(matches, expected, "`{text}` and `{path}`, {names:?}");
    }
}

/// Any rule, and its text.
fn any_rule(choices: &mut impl Choices) -> Rule {
    let group = choices.pick(&["64", "32", "1"]);
    let mark = choices.pick(&Mark::all().collect::<Vec<_>>());
    let mark = mark.with("group", group).unwrap_or(mark);
    let mut rule = Rule::new(&Pattern::any(choices).text(), mark).unwrap();
    if choices.throw(3) == 2 {
        rule = any_roles(choices).iter().fold(rule, Rule::role);
    }
    if choices.throw(3) == 2 {
        rule = any_roles(choices).iter().fold(rule, Rule::output_of);
    }
    if choices.throw(3) == 2 {
        rule = rule.op(choices.pick(&["gelu*", "{add,mul}", "a?d", "softmax", "[a-m]*"])).unwrap();
    }
    if choices.throw(3) == 2 {
        rule = rule.min_bytes(choices.pick(&[0, 64, 1 << 20, u64::MAX]));
    }
    if choices.throw(3) == 2 {
        rule = rule.max_bytes(choices.pick(&[0, 64, 1 << 20, u64::MAX]));
    }
    if choices.throw(3) == 2 {
        rule = rule.rank(choices.throw(4));
    }
    if choices.throw(3) == 2 {
        let dims: Vec<&str> =
            (0..=choices.throw(3)).map(|_| choices.pick(&["*", "4", ">=2", "<3", "<= 4", ">1"])).collect();
        rule = rule.shape(dims).unwrap();
    }
    if choices.throw(3) == 2 {
        rule = rule.max_intensity(choices.pick(&[0.5, 8.0, 1e-3, 0.0, f64::INFINITY]));
    }
    rule
}

/// A rule's text is the rule.
pub fn rule_texts(choices: &mut impl Choices) {
    let rule = any_rule(choices);
    let text = rule.to_string();
    let again: Rule = text.parse().unwrap_or_else(|e| panic!("`{text}`: {e}"));
    assert_eq!(again.to_string(), text);
    assert_eq!(again.mark(), rule.mark(), "{text}");
    let (rule, again) = (RuleSet::new([rule]), RuleSet::new([again]));
    for _ in 0..6 {
        let shape: Vec<usize> = (0..choices.throw(4)).map(|_| choices.throw(6)).collect();
        let path = any_path(choices);
        let op = choices.pick(&["gelu", "add", "mul", "softmax"]);
        let (roles, output_of) = (any_roles(choices), any_roles(choices));
        let site = Site { roles, output_of, ..site(&path, op, &shape, choices.throw(100) as u64) };
        assert_eq!(rule.mark(&site), again.mark(&site), "{text} for {site:?}");
    }
}

/// Whatever a user writes as a pattern, a rule, a policy or a file of rules is taken or an error, and what is taken can
/// be asked for a mark.
pub fn texts(text: &str) {
    let shape = ModelShape { blocks: 3 };
    let ask = |rules: RuleSet| {
        for path in ["blocks.0.mlp.gelu", "embed", "", ".", "a..b", text] {
            rules.mark(&site(path, "gelu", &[2, 3], 7));
            rules.is_segment(&ScopeSite { path, role: None, blocks: &[] });
            // No block's path ends there.
            rules.is_segment(&ScopeSite { path, role: None, blocks: &[BlockScope { end: 1 << 40, index: 3 }] });
        }
    };
    if let Ok(rule) = Rule::new(text, Mark::Keep) {
        ask(RuleSet::new([rule]));
    }
    if let Ok(rule) = text.parse::<Rule>() {
        let text = rule.to_string();
        let again: Rule = text.parse().unwrap_or_else(|e| panic!("`{text}`: {e}"));
        assert_eq!(again.to_string(), text);
        ask(RuleSet::new([rule]));
    }
    for rules in [RuleSet::from_toml(text, &shape), retape_policy::presets::preset(text, &shape)] {
        match rules {
            Ok(rules) => ask(rules),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    // A name that ends so is the path of a file, and reading files isn't what this is about.
    if !text.ends_with(".toml") {
        let _ = parse(text, &shape).map(ask);
    }
    let _ = retape_policy::parse_bytes(text);
}

//! Globs over paths whose segments are separated by `.`; they are globset's, with `.` in the place of `/`.

use globset::{GlobBuilder, GlobMatcher};

/// A compiled pattern of paths: of values and scopes in a policy's rules, of parameters' names where some are frozen.
/// The docs of policies' rules say what patterns mean.
#[derive(Debug, Clone)]
pub struct Glob {
    text: String,
    matcher: GlobMatcher,
}

/// A path in the form that globs are matched against, made once for many.
#[derive(Debug, Clone)]
pub struct Candidate(String);

impl Candidate {
    /// This path.
    pub fn new(path: &str) -> Self {
        Candidate(path.replace('.', "/"))
    }
}

/// Globset panics where a pattern's regex takes more than 10 MiB. Patterns up to this length take less.
const LONGEST: usize = 1 << 16;

/// A pattern for a message: its start, where it is long.
pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(200) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}

impl Glob {
    /// The pattern, or what is wrong with it.
    pub fn new(text: &str) -> Result<Self, String> {
        let wrong = |reason: &str| format!("the pattern `{}` {reason}", shortened(text));
        if text.is_empty() {
            return Err(wrong("is empty; `**` matches every path"));
        }
        if text.len() > LONGEST {
            return Err(wrong(&format!("has {} bytes, more than {LONGEST}; write several rules", text.len())));
        }
        if text.contains('/') {
            return Err(wrong("contains `/`; segments are separated by `.`"));
        }
        if text.split('[').skip(1).any(|class| !class.split(']').next().unwrap_or_default().is_ascii()) {
            return Err(wrong("has a class with a letter that isn't ASCII; write {ä,ö} for [äö]"));
        }
        // Globset takes a run of `**` in an alternative for something else. It means what one of them does.
        let mut single = text.to_owned();
        while single.contains("**.**") {
            single = single.replace("**.**", "**");
        }
        if !stars_are_segments(&single) {
            return Err(wrong("has `**` inside a segment; write `*` there, or `**` as a segment of its own"));
        }
        let glob = GlobBuilder::new(&single.replace('.', "/"))
            .literal_separator(true)
            .backslash_escape(false)
            .build()
            .map_err(|e| wrong(&format!("can't be read: {}", e.kind())))?;
        Ok(Glob { text: text.to_owned(), matcher: glob.compile_matcher() })
    }

    /// The pattern as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pattern matches the whole path.
    pub fn is_match(&self, path: &Candidate) -> bool {
        self.matcher.is_match(&path.0)
    }
}

/// Whether each `**` is a whole segment. Globset reads any other, also one that is a whole alternative, as `*`.
fn stars_are_segments(text: &str) -> bool {
    text == "**"
        || text.match_indices("**").all(|(at, stars)| {
            let (before, after) = (text[..at].chars().next_back(), text[at + stars.len()..].chars().next());
            matches!(before, None | Some('.' | '{' | ','))
                && matches!(after, None | Some('.' | '}' | ','))
                && (before == Some('.') || after == Some('.'))
        })
}

#[cfg(test)]
mod tests {
    use super::{Candidate, Glob, LONGEST};

    #[test]
    fn semantics() {
        for (pattern, matches, others) in [
            (
                "blocks.*.mlp",
                &["blocks.0.mlp", "blocks.10.mlp"][..],
                &["blocks.mlp", "blocks.0.a.mlp", "blocks.0.mlp.gelu"][..],
            ),
            ("blocks.*.**", &["blocks.0.add", "blocks.0.attn.softmax"], &["blocks.0", "blocks", "xblocks.0.add"]),
            ("**.softmax", &["softmax", "attn.softmax", "blocks.0.attn.softmax"], &["softmax.x", "log_softmax"]),
            ("a.**.b", &["a.b", "a.x.b", "a.x.y.b"], &["a", "b", "a.bb"]),
            ("**", &["a", "a.b.c"], &[]),
            ("*", &["a"], &["a.b"]),
            ("blocks.?.ln_{1,2}", &["blocks.3.ln_1", "blocks.3.ln_2"], &["blocks.3.ln_3", "blocks.12.ln_1"]),
            ("{embed,blocks.**}", &["embed", "blocks.0", "blocks.0.add"], &["blocks", "ln_f"]),
            ("blocks.[0-2].add", &["blocks.0.add", "blocks.2.add"], &["blocks.3.add"]),
            ("a.b", &["a.b"], &["axb", "a/bc", "a.B"]),
            ("ü{ä,ö}*", &["üä", "üöß"], &["ü", "ä"]),
            ("a.**.**.b", &["a.b", "a.x.b", "a.x.y.b"], &["a", "b"]),
            ("{a.**.**,**.**.b}", &["a.x", "a.x.y", "b", "x.b"], &["a", "x"]),
            ("mlp.gelu*", &["mlp.gelu", "mlp.gelu_tanh"], &["mlp.gelu.x"]),
        ] {
            let glob = Glob::new(pattern).expect(pattern);
            let is_match = |path: &&str| glob.is_match(&Candidate::new(path));
            assert!(matches.iter().all(is_match), "{pattern} must match {matches:?}");
            assert!(!others.iter().any(is_match), "{pattern} must match none of {others:?}");
        }
    }

    #[test]
    fn bad_patterns() {
        for (pattern, reason) in [
            ("", "is empty"),
            ("blocks/0", "segments are separated by `.`"),
            ("blocks**", "inside a segment"),
            ("blocks.***", "inside a segment"),
            ("{a,**}", "inside a segment"),
            ("{a,**.**}", "inside a segment"),
            ("a.[äö]", "write {ä,ö}"),
            ("blocks.[0", "unclosed character class"),
            ("blocks.{0,1", "unclosed alternate group"),
        ] {
            let error = Glob::new(pattern).expect_err(pattern);
            assert!(error.contains(reason) && error.contains(pattern), "{error}");
        }
    }

    #[test]
    fn long_patterns() {
        for unit in ["a", "?", "*.", "é", "[a-z]", "[!a-z]", "{a,b}", "{?,*}"] {
            let pattern = unit.repeat(LONGEST / unit.len());
            Glob::new(&pattern).expect(unit);
            let error = Glob::new(&format!("{pattern}{unit}{unit}")).expect_err(unit);
            assert!(error.contains("write several rules") && error.len() < 600, "{error}");
        }
        Glob::new(&format!("{{{}}}", "a,".repeat(LONGEST / 2 - 1))).expect("alternatives");
    }
}

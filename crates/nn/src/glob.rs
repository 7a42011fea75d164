//! Patterns over names whose segments are separated by `.`, with the meaning that they have in policies' rules.

use globset::{GlobBuilder, GlobMatcher};

/// A pattern that can be matched.
pub(crate) struct Glob(GlobMatcher);

/// Globset panics where a pattern's regex takes more than 10 MiB. Patterns up to this length take less.
const LONGEST: usize = 1 << 16;

impl Glob {
    /// The pattern, or what is wrong with it.
    pub fn new(text: &str) -> Result<Glob, String> {
        if text.is_empty() {
            return Err("is empty; `**` matches every name".into());
        }
        if text.len() > LONGEST {
            return Err(format!("has {} bytes, more than {LONGEST}; write several patterns", text.len()));
        }
        if text.contains('/') {
            return Err("contains `/`; segments are separated by `.`".into());
        }
        // Globset reads any other `**` as `*`.
        if text.split('.').any(|segment| segment.contains("**") && segment != "**") {
            return Err("has `**` inside a segment; write `*` there, or `**` as a segment of its own".into());
        }
        let mut single = text.to_owned();
        while single.contains("**.**") {
            single = single.replace("**.**", "**");
        }
        let glob = GlobBuilder::new(&single.replace('.', "/"))
            .literal_separator(true)
            .backslash_escape(false)
            .build()
            .map_err(|e| format!("can't be read: {}", e.kind()))?;
        Ok(Glob(glob.compile_matcher()))
    }

    pub fn is_match(&self, name: &str) -> bool {
        self.0.is_match(name.replace('.', "/"))
    }
}

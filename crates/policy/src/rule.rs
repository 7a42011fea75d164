use crate::{Error, Result, parse_bytes};
use retape_core::glob::{Candidate, Glob, shortened};
use retape_core::{Mark, Role, Roles, Site};
use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::str::FromStr;

/// A mark for the values whose path matches a pattern, and that meet every further predicate.
///
/// In a pattern `.` separates segments, `*` and `?` stay within a segment, `[0-3]` is one character of a class (this
/// and `?` are for ASCII: a letter beyond it is two or more bytes, of which `?` is one), `{a,b}` is either
/// alternative, and `**` is any number of segments: none at the start and in the middle (`**.softmax` matches
/// `softmax`), at least one at the end. So `blocks.*.**` matches what lies strictly inside a block, and not the
/// block's output `blocks.0`.
///
/// A pattern is tried against a value's path, and against the path by the numbers of its blocks. Where `gpt.h.3` is a
/// scope of role block, `gpt.h.3.mlp.gelu` is also `blocks.3.mlp.gelu` and `gpt.h.blocks.3.mlp.gelu`, see
/// [`Site::names`]. [`role`](Rule::role) and [`output_of`](Rule::output_of) need no names at all.
///
/// ```
/// # use retape_core::Mark;
/// # use retape_policy::Rule;
/// let rule = Rule::new("blocks.*.mlp.*", Mark::Recompute)?.op("gelu*")?.min_bytes(1 << 20);
/// assert_eq!(rule.to_string(), "blocks.*.mlp.*=recompute where op=gelu*, bytes>=1048576");
/// # Ok::<(), retape_policy::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Rule {
    pattern: Glob,
    /// Sorted.
    ids: Option<Vec<u64>>,
    /// It is inside scopes of all these.
    roles: Roles,
    /// It outlived scopes of all these.
    output_of: Roles,
    op: Option<Glob>,
    min_bytes: Option<u64>,
    max_bytes: Option<u64>,
    rank: Option<usize>,
    shape: Vec<Dim>,
    max_intensity: Option<f64>,
    mark: Mark,
}

impl Rule {
    /// A rule for all values whose path matches `pattern`.
    pub fn new(pattern: &str, mark: Mark) -> Result<Self> {
        let glob = Glob::new(pattern).map_err(|reason| Error::InvalidRule { rule: shortened(pattern), reason })?;
        Ok(Rule {
            pattern: glob,
            ids: None,
            roles: Roles::NONE,
            output_of: Roles::NONE,
            op: None,
            min_bytes: None,
            max_bytes: None,
            rank: None,
            shape: Vec::new(),
            max_intensity: None,
            mark,
        })
    }

    /// Only the values of these numbers on their tape, see [`Site::id`]. They are the same whenever the same ops are
    /// recorded, so a rule like this is for one model and shape: a plan that was written to a file.
    pub fn ids(mut self, ids: impl IntoIterator<Item = u64>) -> Self {
        let mut ids: Vec<u64> = ids.into_iter().collect();
        ids.sort_unstable();
        self.ids = Some(ids);
        self
    }

    /// Only values inside a scope of this role, at any depth. The scope's output is not: it outlives the scope. Of
    /// several roles, all must be around.
    ///
    /// ```
    /// # use retape_core::{Mark, Role};
    /// # use retape_policy::Rule;
    /// let rule = Rule::new("**", Mark::Recompute)?.role(Role::Attention).op("softmax")?;
    /// assert_eq!(rule.to_string(), "**=recompute where role=attention, op=softmax");
    /// # Ok::<(), retape_policy::Error>(())
    /// ```
    pub fn role(mut self, role: Role) -> Self {
        self.roles = self.roles.and(role);
        self
    }

    /// Only outputs of a scope of this role: values that outlived it.
    pub fn output_of(mut self, role: Role) -> Self {
        self.output_of = self.output_of.and(role);
        self
    }

    /// Only results of ops whose name matches this pattern, `gelu*` or `{add,mul}`.
    pub fn op(mut self, pattern: &str) -> Result<Self> {
        self.op = Some(Glob::new(pattern).map_err(|reason| self.invalid(reason))?);
        Ok(self)
    }

    /// Only values of at least `bytes` bytes.
    pub fn min_bytes(mut self, bytes: u64) -> Self {
        self.min_bytes = Some(bytes);
        self
    }

    /// Only values of at most `bytes` bytes.
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = Some(bytes);
        self
    }

    /// Only values with `rank` dimensions.
    pub fn rank(mut self, rank: usize) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Only values whose last dimensions are like these: `*` (any), `64`, `<64`, `<=64`, `>64`, `>=64`. The last
    /// constraint is for the last dimension and so on backwards, and dimensions before the first one are free: with
    /// `["*", ">=1024"]` a value has at least two, and at least 1024 elements along the last.
    pub fn shape<'a>(mut self, dims: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        self.shape = dims
            .into_iter()
            .map(|text| {
                Dim::parse(text).ok_or_else(|| {
                    self.invalid(format!(
                        "`{text}` does not constrain a dimension; write *, 64, <64, <=64, >64 or >=64"
                    ))
                })
            })
            .collect::<Result<_>>()?;
        Ok(self)
    }

    /// Only values whose computation takes at most `flops_per_byte` FLOPs for each byte that it reads or writes.
    pub fn max_intensity(mut self, flops_per_byte: f64) -> Self {
        self.max_intensity = Some(flops_per_byte);
        self
    }

    /// The mark it gives.
    pub fn mark(&self) -> Mark {
        self.mark
    }

    /// The pattern of the paths that it is for.
    pub(crate) fn pattern(&self) -> &Glob {
        &self.pattern
    }

    /// Whether it is for this value, the path apart.
    pub(crate) fn accepts(&self, site: &Site<'_>) -> bool {
        site.roles.contains_all(self.roles)
            && site.output_of.contains_all(self.output_of)
            && self.ids.as_ref().is_none_or(|ids| ids.binary_search(&site.id).is_ok())
            && self.min_bytes.is_none_or(|min| site.bytes >= min)
            && self.max_bytes.is_none_or(|max| site.bytes <= max)
            && self.rank.is_none_or(|rank| site.shape.len() == rank)
            && self.shape.len() <= site.shape.len()
            && self.shape.iter().rev().zip(site.shape.iter().rev()).all(|(dim, size)| dim.sizes.contains(size))
            && self.max_intensity.is_none_or(|max| site.flops as f64 <= max * site.traffic as f64)
            && self.op.as_ref().is_none_or(|op| op.is_match(&Candidate::new(site.op)))
    }

    fn invalid(&self, reason: String) -> Error {
        Error::InvalidRule { rule: shortened(self.pattern.text()), reason }
    }
}

/// Reads `GLOB=keep` and so for each mark; arguments of the mark may follow (`GLOB=int8:group=32:rounding=stochastic`),
/// and predicates as `Display` writes them:
/// ` where role=attention, output_of=block, op=gelu*, bytes>=64, bytes<=4096, rank=2, shape=[*, >=8], ids=[3, 7],
/// intensity<=8`.
impl FromStr for Rule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |reason: &str| Error::InvalidRule { rule: shortened(text), reason: reason.to_owned() };
        // Patterns may hold any character: `where` begins the predicates only where a mark is before it.
        let (head, predicates) = match text.rsplit_once(" where ") {
            Some((head, predicates)) if head.contains('=') => (head, Some(predicates)),
            _ => (text, None),
        };
        let (pattern, mark) = split_mark(head)
            .ok_or_else(|| wrong(&format!("has no mark; write GLOB=MARK, where the marks are {}", mark_names())))?;
        let mark = match mark.split_once(':') {
            Some((name, _)) => parse_mark(name).and(mark.parse().map_err(|reason: String| wrong(&reason)))?,
            None => parse_mark(mark)?,
        };
        let rule = Rule::new(pattern, mark)?;
        outside_brackets(predicates.unwrap_or_default()).try_fold(rule, Rule::with_predicate)
    }
}

/// The pattern and the mark of a rule. Arguments of a mark hold `=`, too: `GLOB=int8:group=32`.
fn split_mark(head: &str) -> Option<(&str, &str)> {
    let (mut pattern, _) = head.rsplit_once('=')?;
    while let Some((before, _)) = pattern.rsplit_once(':')
        && let Some((earlier, _)) = before.rsplit_once('=')
    {
        pattern = earlier;
    }
    Some((pattern, &head[pattern.len() + 1..]))
}

/// What stands between commas that no bracket or brace is around.
fn outside_brackets(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    text.split(move |c| {
        depth += i32::from(matches!(c, '[' | '{')) - i32::from(matches!(c, ']' | '}'));
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|predicate| !predicate.is_empty())
}

impl Rule {
    /// The role of this name.
    fn parse_role(&self, name: &str) -> Result<Role> {
        parse_role(name).map_err(|reason| self.invalid(reason))
    }

    /// This rule with a predicate as `Display` writes it.
    fn with_predicate(self, text: &str) -> Result<Self> {
        let split = |relation: &'static str| {
            text.split_once(relation).map(|(name, value)| (name.trim(), relation, value.trim()))
        };
        let parts = [">=", "<=", "="].into_iter().filter_map(split).min_by_key(|(name, ..)| name.len());
        let wrong = || {
            let reason = format!(
                "`{text}` is no predicate; write role=ROLE, output_of=ROLE, op=GLOB, bytes>=N, bytes<=N, rank=N, \
                 shape=[*, >=8], ids=[1, 2] or intensity<=N"
            );
            self.invalid(reason)
        };
        match parts.ok_or_else(wrong)? {
            ("role", "=", name) => self.parse_role(name).map(|role| self.role(role)),
            ("output_of", "=", name) => self.parse_role(name).map(|role| self.output_of(role)),
            ("op", "=", glob) => self.op(glob),
            ("bytes", ">=", bytes) => parse_bytes(bytes).map(|bytes| self.min_bytes(bytes)),
            ("bytes", "<=", bytes) => parse_bytes(bytes).map(|bytes| self.max_bytes(bytes)),
            ("rank", "=", rank) => rank.parse().map_err(|_| wrong()).map(|rank| self.rank(rank)),
            ("shape", "=", dims) => {
                let dims = dims.strip_prefix('[').and_then(|dims| dims.strip_suffix(']')).ok_or_else(wrong)?;
                self.shape(dims.split(',').map(str::trim))
            }
            ("ids", "=", list) => {
                let list = list.strip_prefix('[').and_then(|list| list.strip_suffix(']'));
                let ids =
                    list.and_then(|list| list.split(',').map(|id| id.trim().parse().ok()).collect::<Option<Vec<_>>>());
                let ids = ids.ok_or_else(wrong)?;
                Ok(self.ids(ids))
            }
            ("intensity", "<=", max) => max.parse().map_err(|_| wrong()).map(|max| self.max_intensity(max)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern.text(), self.mark.text())?;
        let shape: Vec<_> = self.shape.iter().map(|dim| dim.text.as_str()).collect();
        let roles = self.roles.iter().map(|role| format!("role={role}"));
        let outputs = self.output_of.iter().map(|role| format!("output_of={role}"));
        let predicates = [
            self.op.as_ref().map(|op| format!("op={}", op.text())),
            self.min_bytes.map(|bytes| format!("bytes>={bytes}")),
            self.max_bytes.map(|bytes| format!("bytes<={bytes}")),
            self.rank.map(|rank| format!("rank={rank}")),
            (!shape.is_empty()).then(|| format!("shape=[{}]", shape.join(", "))),
            self.max_intensity.map(|max| format!("intensity<={max}")),
            self.ids.as_ref().map(|ids| format!("ids={ids:?}")),
        ];
        for (i, predicate) in roles.chain(outputs).chain(predicates.into_iter().flatten()).enumerate() {
            write!(f, "{}{predicate}", if i == 0 { " where " } else { ", " })?;
        }
        Ok(())
    }
}

/// The mark of this name, with the usual arguments.
pub fn parse_mark(name: &str) -> Result<Mark> {
    Mark::all().find(|mark| mark.name() == name).ok_or_else(|| Error::UnknownMark(name.to_owned()))
}

/// The names of all marks, as a sentence lists them.
pub(crate) fn mark_names() -> String {
    let mut names: Vec<&str> = Mark::all().map(Mark::name).collect();
    let last = names.pop().unwrap_or_default();
    format!("{} and {last}", names.join(", "))
}

/// The role of this name, or what is wrong with it.
pub(crate) fn parse_role(name: &str) -> Result<Role, String> {
    let all = || Role::ALL.map(Role::name).join(", ");
    Role::from_name(name).ok_or_else(|| format!("`{}` is no role; the roles are {}", shortened(name), all()))
}

/// A constraint on one dimension.
#[derive(Debug, Clone)]
struct Dim {
    text: String,
    sizes: (Bound<usize>, Bound<usize>),
}

impl Dim {
    fn parse(text: &str) -> Option<Self> {
        use Bound::{Excluded, Included, Unbounded};
        let number_at = text.find(|c: char| c.is_ascii_digit()).unwrap_or(text.len());
        let (relation, number) = text.split_at(number_at);
        let number = || number.parse().ok();
        let sizes = match relation.trim_end() {
            "*" if number_at == text.len() => (Unbounded, Unbounded),
            "" => (Included(number()?), Included(number()?)),
            "<" => (Unbounded, Excluded(number()?)),
            "<=" => (Unbounded, Included(number()?)),
            ">" => (Excluded(number()?), Unbounded),
            ">=" => (Included(number()?), Unbounded),
            _ => return None,
        };
        Some(Dim { text: text.to_owned(), sizes })
    }
}

use crate::Rule;
use crate::names::Names;
use retape_core::glob::Glob;
use retape_core::{Decision, Ledger, Lint, Origin, Policy, PresetInfo, RuleInfo, ScopeSite, Site};

/// Rules in order, of which the first that matches a value decides its mark.
#[derive(Debug, Clone, Default)]
pub struct RuleSet {
    rules: Vec<Rule>,
    infos: Vec<RuleInfo>,
    presets: Vec<PresetInfo>,
    segments: Vec<Glob>,
    lints: Vec<fn(&Ledger) -> Option<Lint>>,
}

impl RuleSet {
    /// A user's rules: one that matches nothing is an error.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Self {
        RuleSet::named(Origin::User, rules, |_, rule| rule.to_string())
    }

    /// The rules of a preset: one that matches nothing is lint.
    pub(crate) fn preset(name: &str, rules: impl IntoIterator<Item = Rule>) -> Self {
        RuleSet::named(Origin::Preset, rules, |_, rule| format!("{name}: {rule}"))
    }

    /// Says of a preset which values it is for, and what to do where there are none. That is an error on a model
    /// without roles, and lint on others.
    pub(crate) fn looking_for(mut self, name: &str, looks_for: &str, advice: &str) -> Self {
        let (name, looks_for, advice) = (name.to_owned(), looks_for.to_owned(), advice.to_owned());
        self.presets.push(PresetInfo { name, rules: 0..self.rules.len(), looks_for, advice });
        self
    }

    /// Rules that ledgers and messages call by what `name` makes of their index.
    pub(crate) fn named(
        origin: Origin,
        rules: impl IntoIterator<Item = Rule>,
        name: impl Fn(usize, &Rule) -> String,
    ) -> Self {
        let rules: Vec<_> = rules.into_iter().collect();
        let infos = rules.iter().enumerate().map(|(i, rule)| RuleInfo { name: name(i, rule), origin }).collect();
        RuleSet { rules, infos, ..RuleSet::default() }
    }

    /// Makes segments of the scopes that match.
    pub(crate) fn with_segments(mut self, scopes: Glob) -> Self {
        self.segments.push(scopes);
        self
    }

    /// Adds what the set has to say of a ledger.
    pub(crate) fn with_lint(mut self, lint: fn(&Ledger) -> Option<Lint>) -> Self {
        self.lints.push(lint);
        self
    }

    /// These rules, and where none of them matches the `other`'s. A scope is a segment if either says so.
    pub fn then(mut self, other: RuleSet) -> Self {
        let before = self.rules.len();
        self.presets.extend(other.presets.into_iter().map(|preset| {
            let rules = before + preset.rules.start..before + preset.rules.end;
            PresetInfo { rules, ..preset }
        }));
        self.rules.extend(other.rules);
        self.infos.extend(other.infos);
        self.segments.extend(other.segments);
        self.lints.extend(other.lints);
        self
    }
}

impl Policy for RuleSet {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let paths = Names::new(|| site.names());
        let rule = self.rules.iter().position(|rule| rule.accepts(site) && paths.any(rule.pattern()))?;
        Some(Decision { mark: self.rules[rule].mark(), rule })
    }

    fn rules(&self) -> &[RuleInfo] {
        &self.infos
    }

    fn presets(&self) -> &[PresetInfo] {
        &self.presets
    }

    fn is_segment(&self, scope: &ScopeSite<'_>) -> bool {
        let paths = Names::new(|| scope.names());
        self.segments.iter().any(|glob| paths.any(glob))
    }

    fn lint(&self, ledger: &Ledger) -> Vec<Lint> {
        self.lints.iter().filter_map(|lint| lint(ledger)).collect()
    }
}

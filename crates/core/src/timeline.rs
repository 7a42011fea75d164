//! Memory over a step: the meter's log, replayed.

use crate::{Contents, MemoryEvent, MemoryKind, Moment, Phase};
use std::collections::HashMap;
use std::ops::Index;

/// Bytes of each [`MemoryKind`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KindBytes([u64; MemoryKind::ALL.len()]);

impl KindBytes {
    /// The bytes of what a step adds: all kinds but parameters, their gradients and optimizer state.
    pub fn step(&self) -> u64 {
        MemoryKind::ALL.into_iter().filter(|kind| kind.is_step()).map(|kind| self[kind]).sum()
    }
}

impl Index<MemoryKind> for KindBytes {
    type Output = u64;

    fn index(&self, kind: MemoryKind) -> &u64 {
        &self.0[kind as usize]
    }
}

/// What was live after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelinePoint {
    /// What the tape was doing.
    pub moment: Moment,
    /// Live bytes.
    pub bytes: KindBytes,
}

/// A piece of memory that is live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveAllocation {
    /// Its number on the device.
    pub allocation: u64,
    /// Its bytes.
    pub bytes: u64,
    /// What it is counted as.
    pub kind: MemoryKind,
    /// When it was taken.
    pub made: Moment,
    /// What lies in it, where a tape said so: else it is an op's temporary, or not a tape's.
    pub holds: Option<Contents>,
    /// It was there before the step.
    pub before: bool,
}

/// A path, and the op there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeName {
    /// Scopes and name.
    pub path: String,
    /// The op, `leaf` for a leaf.
    pub op: &'static str,
}

/// The names of a tape's nodes and values, see [`Tape::names`](crate::Tape::names).
#[derive(Debug, Clone, Default)]
pub struct TapeNames {
    pub(crate) nodes: HashMap<u64, NodeName>,
    pub(crate) values: HashMap<u64, NodeName>,
    /// How values are stored that are marked to be, in words.
    pub(crate) formats: HashMap<u64, &'static str>,
}

impl TapeNames {
    /// The node of a moment.
    pub fn node(&self, moment: Moment) -> Option<&NodeName> {
        self.nodes.get(&moment.node)
    }

    /// A value, by its number on the tape.
    pub fn value(&self, id: u64) -> Option<&NodeName> {
        self.values.get(&id)
    }

    /// What a piece of memory is: a path, where it is known, and in words what it is of that path.
    pub fn describe(&self, piece: &LiveAllocation) -> (Option<&str>, &'static str) {
        fn path(name: Option<&NodeName>) -> Option<&str> {
            name.map(|n| n.path.as_str())
        }
        match piece.holds {
            Some(Contents::Gradient(id)) => (path(self.value(id)), "gradient"),
            Some(Contents::Value(id)) => {
                let what = match (piece.kind, piece.made.phase) {
                    (MemoryKind::Saved, _) => "saved",
                    (MemoryKind::Quantized, _) => self.formats.get(&id).copied().unwrap_or("saved in fewer bytes"),
                    (MemoryKind::Recomputed, Phase::Replay) => "replayed",
                    (MemoryKind::Recomputed, _) => "dequantized",
                    (MemoryKind::Activation, _) => "in use",
                    (MemoryKind::Parameter, _) => "parameter",
                    _ => "input",
                };
                (path(self.value(id)), what)
            }
            None if piece.before => match piece.kind {
                MemoryKind::Parameter => (None, "parameter"),
                MemoryKind::Gradient => (None, "gradient from before the step"),
                MemoryKind::Optimizer => (None, "optimizer state"),
                _ => (None, "held before the step"),
            },
            None if piece.kind == MemoryKind::Workspace => (path(self.node(piece.made)), "workspace"),
            None => (path(self.node(piece.made)), "temporary"),
        }
    }
}

/// Memory over a step, event by event.
///
/// ```
/// use retape_core::{DType, Tape, Tensor, Timeline, meta};
///
/// let device = meta();
/// device.meter().set_logging(true);
/// let x = Tensor::full(&device, &[64, 64], DType::F32, 0.0)?;
/// let before = device.meter().take_log();
/// device.meter().reset_peak();
///
/// let tape = Tape::new(&device);
/// let h = tape.leaf(&x)?.gelu()?.softmax()?;
/// let loss = h.square()?.sum()?;
/// let names = tape.names();
/// let _gradients = tape.backward(&loss)?;
///
/// let timeline = Timeline::replay(&before, &device.meter().take_log());
/// assert_eq!(timeline.peak_bytes(), device.meter().step_peak());
/// for piece in timeline.contents() {
///     let (path, what) = names.describe(piece);
///     println!("{:>8} {} {what}", piece.bytes, path.unwrap_or("-"));
/// }
/// # Ok::<(), retape_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    before: KindBytes,
    points: Vec<TimelinePoint>,
    peak: Option<usize>,
    contents: Vec<LiveAllocation>,
}

impl Timeline {
    /// Replays what the meter logged of a step. `before` is what it logged earlier, since the device was made: it says
    /// what was live when the step began.
    pub fn replay(before: &[MemoryEvent], step: &[MemoryEvent]) -> Timeline {
        let mut state = State { says: first_notes(before, step), ..State::default() };
        before.iter().for_each(|event| state.apply(event));
        state.pieces.values_mut().for_each(|piece| piece.before = true);
        let mut timeline = Timeline { before: state.bytes, ..Timeline::default() };
        // Where in `step` the peak is. What is live there is listed in a second pass, once.
        let (mut highest, mut end) = (state.bytes.step(), 0);
        let mut ahead = state.clone();
        for (i, event) in step.iter().enumerate() {
            ahead.apply(event);
            if event.holds.is_some() {
                continue;
            }
            if ahead.bytes.step() > highest {
                (highest, end) = (ahead.bytes.step(), i + 1);
                timeline.peak = Some(timeline.points.len());
            }
            timeline.points.push(TimelinePoint { moment: event.moment, bytes: ahead.bytes });
        }
        step[..end].iter().for_each(|event| state.apply(event));
        timeline.contents = state.step_pieces();
        timeline
    }

    /// What was live before the first event.
    pub fn before(&self) -> KindBytes {
        self.before
    }

    /// What was live after each event that changed it.
    pub fn points(&self) -> &[TimelinePoint] {
        &self.points
    }

    /// The first point at which the step bytes are highest; none where they never exceed those before.
    pub fn peak(&self) -> Option<usize> {
        self.peak
    }

    /// The highest step bytes: [`MemoryMeter::step_peak`](crate::MemoryMeter::step_peak) of the step.
    pub fn peak_bytes(&self) -> u64 {
        self.peak.map_or(self.before, |peak| self.points[peak].bytes).step()
    }

    /// What is live at the peak and counts as step bytes, the largest first.
    pub fn contents(&self) -> &[LiveAllocation] {
        &self.contents
    }
}

/// The first that is said of each allocation: it holds before it is said too, while the op that fills it runs.
fn first_notes(before: &[MemoryEvent], step: &[MemoryEvent]) -> HashMap<u64, Contents> {
    let mut notes = HashMap::new();
    for event in before.iter().chain(step) {
        if let Some(holds) = event.holds {
            notes.entry(event.allocation).or_insert(holds);
        }
    }
    notes
}

#[derive(Debug, Clone, Default)]
struct State {
    pieces: HashMap<u64, LiveAllocation>,
    bytes: KindBytes,
    says: HashMap<u64, Contents>,
}

impl State {
    fn apply(&mut self, event: &MemoryEvent) {
        let MemoryEvent { moment, allocation, bytes, kind, holds } = *event;
        if let Some(holds) = holds {
            if let Some(piece) = self.pieces.get_mut(&allocation) {
                piece.holds = Some(holds);
            }
            return;
        }
        let made = match self.pieces.remove(&allocation) {
            Some(piece) => {
                self.bytes.0[piece.kind as usize] -= piece.bytes;
                LiveAllocation { kind: kind.unwrap_or(piece.kind), ..piece }
            }
            None => LiveAllocation {
                allocation,
                bytes,
                kind: kind.unwrap_or(MemoryKind::Workspace),
                made: moment,
                holds: self.says.get(&allocation).copied(),
                before: false,
            },
        };
        if let Some(kind) = kind {
            self.bytes.0[kind as usize] += bytes;
            self.pieces.insert(allocation, made);
        }
    }

    fn step_pieces(&self) -> Vec<LiveAllocation> {
        let mut pieces: Vec<LiveAllocation> = self.pieces.values().copied().filter(|p| p.kind.is_step()).collect();
        pieces.sort_by_key(|p| (std::cmp::Reverse(p.bytes), p.allocation));
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scope;
    use crate::{DType, Int8Spec, Mark, Tape, Tensor, Var, meta};
    use std::collections::BTreeMap;

    fn event(allocation: u64, bytes: u64, kind: Option<MemoryKind>) -> MemoryEvent {
        MemoryEvent { moment: Moment::default(), allocation, bytes, kind, holds: None }
    }

    fn note(allocation: u64, holds: Contents) -> MemoryEvent {
        MemoryEvent { kind: Some(MemoryKind::Activation), holds: Some(holds), ..event(allocation, 0, None) }
    }

    #[test]
    fn events_become_bytes_by_kind() {
        let before = [event(1, 10, Some(MemoryKind::Parameter)), event(2, 5, Some(MemoryKind::Input))];
        let step = [
            event(3, 100, Some(MemoryKind::Activation)),
            note(3, Contents::Value(7)),
            event(3, 100, Some(MemoryKind::Saved)),
            event(4, 30, Some(MemoryKind::Workspace)),
            event(4, 30, None),
            event(3, 100, None),
        ];
        let timeline = Timeline::replay(&before, &step);
        let steps: Vec<u64> = timeline.points().iter().map(|p| p.bytes.step()).collect();
        assert_eq!(steps, [105, 105, 135, 105, 5]);
        assert_eq!((timeline.peak(), timeline.peak_bytes()), (Some(2), 135));
        assert_eq!(timeline.points()[1].bytes[MemoryKind::Saved], 100);
        assert!(timeline.points().iter().all(|p| p.bytes[MemoryKind::Parameter] == 10));
        let contents: Vec<_> = timeline.contents().iter().map(|p| (p.bytes, p.kind, p.holds, p.before)).collect();
        assert_eq!(
            contents,
            [
                (100, MemoryKind::Saved, Some(Contents::Value(7)), false),
                (30, MemoryKind::Workspace, None, false),
                (5, MemoryKind::Input, None, true)
            ]
        );
    }

    #[test]
    fn what_an_op_is_filling_has_its_name_already() {
        let step = [
            event(1, 8, Some(MemoryKind::Activation)),
            event(2, 8, Some(MemoryKind::Workspace)),
            event(2, 8, None),
            note(1, Contents::Value(3)),
            note(1, Contents::Gradient(4)),
        ];
        let timeline = Timeline::replay(&[], &step);
        assert_eq!(timeline.contents()[0].holds, Some(Contents::Value(3)));
    }

    #[test]
    fn nothing_has_no_peak() {
        let timeline = Timeline::replay(&[event(1, 8, Some(MemoryKind::Input))], &[event(1, 8, None)]);
        assert_eq!((timeline.peak(), timeline.peak_bytes(), timeline.contents().len()), (None, 8, 1));
        assert_eq!(Timeline::replay(&[], &[]).peak_bytes(), 0);
    }

    /// Three blocks, of which one keeps, one recomputes and one stores int8.
    fn forward(tape: &Tape, x: &Tensor, w: &Tensor) -> crate::Result<Var> {
        let mut h = tape.leaf(x)?;
        let marks = [Mark::Keep, Mark::Recompute, Mark::Int8(Int8Spec::default())];
        for (i, mark) in marks.into_iter().enumerate() {
            let _scope = tape.scope(scope(format!("blocks.{i}")).mark(mark));
            let w = tape.leaf(w)?;
            h = h.matmul(&w)?.gelu()?.softmax()?;
        }
        h.square()?.sum()
    }

    #[test]
    fn the_peak_is_the_meters_and_its_contents_have_names() {
        let device = meta();
        device.meter().set_logging(true);
        let x = Tensor::full(&device, &[64, 128], DType::F32, 0.0).unwrap();
        let w = Tensor::full(&device, &[128, 128], DType::F32, 0.0).unwrap();
        let before = device.meter().take_log();
        device.meter().reset_peak();
        let tape = Tape::new(&device);
        let loss = forward(&tape, &x, &w).unwrap();
        let (names, ledger) = (tape.names(), tape.ledger().unwrap());
        let first_part = device.meter().take_log();
        let forward_only = Timeline::replay(&before, &first_part);
        let end = forward_only.points().last().unwrap().bytes;
        let gradients = tape.backward(&loss).unwrap();
        let all: Vec<MemoryEvent> = first_part.into_iter().chain(device.meter().take_log()).collect();
        let timeline = Timeline::replay(&before, &all);

        assert_eq!(timeline.peak_bytes(), device.meter().step_peak());
        assert_eq!(timeline.contents().iter().map(|p| p.bytes).sum::<u64>(), timeline.peak_bytes());
        assert_eq!(timeline.points()[timeline.peak().unwrap()].moment, device.meter().peak_moment());
        assert_eq!(timeline.points().last().unwrap().bytes.step(), device.meter().step_live());
        assert_eq!(end[MemoryKind::Saved] + end[MemoryKind::Quantized], ledger.totals().stored_bytes);

        // At the end of forward the pieces are the ledger's entries, path by path.
        let mut state = State { says: first_notes(&before, &all), ..State::default() };
        before.iter().chain(&all[..]).take(before.len() + position_of_backward(&all)).for_each(|e| state.apply(e));
        let mut by_path: BTreeMap<String, u64> = BTreeMap::new();
        for piece in state.pieces.values().filter(|p| matches!(p.kind, MemoryKind::Saved | MemoryKind::Quantized)) {
            *by_path.entry(names.describe(piece).0.unwrap().to_owned()).or_default() += piece.bytes;
        }
        let stored = ledger.values.iter().filter(|v| v.stored_bytes > 0 && v.op != "leaf");
        assert_eq!(by_path, stored.map(|v| (v.path.clone(), v.stored_bytes)).collect());

        // Every piece that backward ever takes is something of a path.
        let mut said = BTreeMap::new();
        for event in &all {
            state.apply(event);
            if let Some(piece) = state.pieces.get(&event.allocation).filter(|p| p.kind.is_step()) {
                let (path, what) = names.describe(piece);
                said.entry(what).or_insert_with(Vec::new).push(path.unwrap_or("-").to_owned());
            }
        }
        for (what, path) in [
            ("saved", "blocks.0.gelu"),
            ("saved as int8", "blocks.2.gelu"),
            ("dequantized", "blocks.2.matmul"),
            ("replayed", "blocks.1.matmul"),
            ("gradient", "blocks.1.matmul"),
        ] {
            assert!(said[what].iter().any(|p| p == path), "no {what} {path} in {said:#?}");
        }
        drop(gradients);
    }

    fn position_of_backward(events: &[MemoryEvent]) -> usize {
        events.iter().position(|e| e.moment.phase == Phase::Backward).unwrap()
    }
}

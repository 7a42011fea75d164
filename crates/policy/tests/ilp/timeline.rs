//! The memory of a run, event by event.

use crate::graphs::Marks;
use retape_core::{Mark, MemoryEvent, MemoryKind, MemoryMeter, Phase, Trace};
use std::collections::HashMap;
use std::rc::Rc;

/// A place in backward: at a node, after `events` of its events (replays don't count).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub node: u64,
    pub events: usize,
}

impl Place {
    /// Whether this is before the other one: backward goes from the last node to the first.
    pub fn before(self, other: Place) -> bool {
        self.node > other.node || self.node == other.node && self.events < other.events
    }
}

/// Step bytes after each event of a run.
pub struct Timeline {
    pub events: Vec<(MemoryEvent, f64)>,
    /// Where backward begins.
    pub backward: usize,
    start: f64,
}

impl Timeline {
    pub fn of(trace: &Trace, meter: &MemoryMeter, marks: &[(u64, Mark)]) -> Timeline {
        let start = meter.step_live() as f64;
        meter.set_logging(true);
        trace.run(Some(Rc::new(Marks::new(marks)))).unwrap();
        let log = meter.take_log();
        meter.set_logging(false);
        let mut kinds: HashMap<u64, MemoryKind> = HashMap::new();
        let step = |kind: Option<MemoryKind>, bytes: u64| {
            if kind.is_some_and(MemoryKind::is_step) { bytes as f64 } else { 0.0 }
        };
        let mut live = start;
        let events: Vec<_> = log
            .into_iter()
            .filter(|event| event.holds.is_none()) // those only name what is there
            .map(|event| {
                let before = match event.kind {
                    Some(kind) => kinds.insert(event.allocation, kind),
                    None => kinds.remove(&event.allocation),
                };
                live += step(event.kind, event.bytes) - step(before, event.bytes);
                (event, live)
            })
            .collect();
        let in_backward = |e: &(MemoryEvent, f64)| e.0.moment.phase != Phase::Forward;
        let backward = events.iter().position(in_backward).expect("backward takes memory");
        Timeline { events, backward, start }
    }

    /// Bytes before an event.
    pub fn before(&self, event: usize) -> f64 {
        if event == 0 { self.start } else { self.events[event - 1].1 }
    }

    /// The places of the events of backward, those of replays not counted.
    pub fn places(&self) -> Vec<Place> {
        let mut before: HashMap<u64, usize> = HashMap::new();
        let of = self.events[self.backward..].iter().map(|(event, _)| {
            let events = before.entry(event.moment.node).or_default();
            let place = Place { node: event.moment.node, events: *events };
            *events += usize::from(event.moment.phase == Phase::Backward);
            place
        });
        of.collect()
    }
}

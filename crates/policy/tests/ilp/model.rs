//! The rules of the engine as linear constraints on the marks of a recorded forward pass.
//!
//! A value that backward reads is there from its first read on, whatever its mark: until then it is there as a store,
//! as int8, or because a chain of replays ran through it. So of all that happens in backward only the first reads
//! matter, here called *stops*, in the order of the pass. For each value and stop, a variable tells whether the value
//! was replayed by then. What no mark changes (handles, gradients, workspaces) is taken from the engine's log of
//! memory.

use crate::graphs::Marks;
use crate::linear::Linear;
use crate::timeline::{Place, Timeline};
use retape_core::{DryRun, Int8Spec, Mark, MemoryEvent, MemoryKind, Moment, Phase, Trace};
use std::collections::HashMap;
use std::rc::Rc;

/// What becomes of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    Keep,
    Recompute,
    Int8,
}

/// A variable in 0 ..= 1. The solver branches on those of marks; the others follow from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variable {
    Recompute(usize),
    Int8(usize),
    /// Item, stop: marked Recompute and replayed by then.
    Replayed(usize, usize),
    /// Item, stop, which consumers: marked Int8 and dequantized for a replay by then, by that consumer or one before
    /// it.
    Dequantized(usize, usize, usize),
    /// Item, how many stops have passed: kept, only replays read it, and they have yet to.
    Waits(usize, usize),
    /// As that, of an int8 store.
    WaitsInt8(usize, usize),
}

/// A value whose mark is free.
#[derive(Debug, Clone)]
pub struct Item {
    /// Index into the trace's values.
    pub value: usize,
    pub bytes: f64,
    pub int8_bytes: Option<f64>,
    /// Recording order.
    sequence: u64,
    /// Seconds of a replay of its node.
    seconds: f64,
    /// The most that a replay of its node takes: its outputs, and workspace.
    takes: f64,
    /// Items that are computed from it, in recording order.
    consumers: Vec<usize>,
    /// Of its first read.
    stop: Option<usize>,
    /// Node and place among its events at which its int8 store goes.
    int8_end: Option<Place>,
}

/// A first read.
#[derive(Debug)]
struct Stop {
    item: usize,
    place: Place,
}

#[derive(Debug)]
pub struct Model<'a> {
    pub trace: &'a Trace,
    pub items: Vec<Item>,
    stops: Vec<Stop>,
    pub variables: Vec<Variable>,
    number: HashMap<[usize; 4], usize>,
    /// Bytes live at each moment at which they may be highest.
    pub rows: Vec<Linear>,
    /// What must be at least 0.
    pub rules: Vec<Linear>,
    /// Seconds of replays, quantizing and dequantizing.
    pub cost: Linear,
    /// Seconds of a step without any.
    pub step: f64,
}

/// Seconds of a node by the default costs, written down once more.
pub fn seconds(flops: u64, traffic: u64) -> f64 {
    flops as f64 / 100e9 + traffic as f64 / 10e9
}

impl<'a> Model<'a> {
    /// # Panics
    /// Where the graph isn't of the kind that this model describes: see the assertions.
    pub fn new(trace: &'a Trace, meter: &retape_core::MemoryMeter, int8: bool) -> Model<'a> {
        let (nodes, values) = (trace.nodes(), trace.values());
        let free: Vec<usize> = (0..values.len()).filter(|&v| !values[v].exact && values[v].given.is_none()).collect();
        let item_of: HashMap<usize, usize> = free.iter().enumerate().map(|(i, &v)| (v, i)).collect();
        let mut items: Vec<Item> = free.iter().map(|&v| Model::item(trace, v, int8)).collect();
        let mut reads: Vec<Vec<u64>> = vec![Vec::new(); items.len()];
        for node in nodes {
            let of =
                |values: &[usize]| -> Vec<usize> { values.iter().filter_map(|v| item_of.get(v).copied()).collect() };
            let outputs = of(&node.outputs);
            assert!(outputs.len() <= 1, "{}: a replay that fills several free values", node.op);
            for input in of(&node.inputs) {
                let consumers = &mut items[input].consumers;
                consumers.extend(outputs.iter().filter(|o| !consumers.contains(o)).copied().collect::<Vec<_>>());
            }
            of(&node.reads).into_iter().for_each(|item| reads[item].push(node.sequence));
        }
        for (item, reads) in items.iter().zip(&reads) {
            let Some(&last_read) = reads.first() else {
                assert!(item.consumers.len() <= 1, "{}: read by several replays alone", values[item.value].path);
                continue;
            };
            // Else a replay may be the last reader, and the op doesn't own what it reads.
            let consumers = item.consumers.iter().all(|&c| items[c].sequence >= last_read);
            assert!(consumers, "{}: replays read it after backward", values[item.value].path);
        }
        let mut model = Model {
            trace,
            items,
            stops: Vec::new(),
            variables: Vec::new(),
            number: HashMap::new(),
            rows: Vec::new(),
            rules: Vec::new(),
            cost: Linear::default(),
            step: 3.0 * nodes.iter().map(|n| seconds(n.flops, n.traffic)).sum::<f64>(),
        };
        model.find_places(meter, &reads);
        model.declare();
        model.state_rules();
        model.forward_rows(meter);
        model.backward_rows(meter);
        model.drop_rows_below_others();
        model
    }

    fn item(trace: &Trace, index: usize, int8: bool) -> Item {
        let value = &trace.values()[index];
        let node = &trace.nodes()[value.node];
        let quantized = || {
            let rows = value.shape[..value.shape.len().saturating_sub(1)].iter().product::<usize>();
            let last = value.shape.last().copied().unwrap_or(1);
            (rows * last + 4 * rows * last.div_ceil(Int8Spec::default().group)) as f64
        };
        Item {
            value: index,
            bytes: value.bytes as f64,
            int8_bytes: (int8 && !value.read_exactly).then(quantized),
            sequence: node.sequence,
            seconds: seconds(node.flops, node.traffic),
            takes: 0.0,
            consumers: Vec::new(),
            stop: None,
            int8_end: None,
        }
    }

    fn all(&self, mark: Mark) -> Vec<(u64, Mark)> {
        self.items.iter().map(|i| (self.trace.values()[i.value].id, mark)).collect()
    }

    /// Marks for the engine.
    pub fn marks(&self, choices: &[Choice]) -> Vec<(u64, Mark)> {
        let mut marks = self.all(Mark::Keep);
        for (mark, choice) in marks.iter_mut().zip(choices) {
            mark.1 = match choice {
                Choice::Keep => Mark::Keep,
                Choice::Recompute => Mark::Recompute,
                Choice::Int8 => Mark::Int8(Int8Spec::default()),
            };
        }
        marks
    }

    /// Peak and cost as the engine has them.
    pub fn run(&self, choices: &[Choice]) -> (DryRun, f64) {
        let run = self.trace.run(Some(Rc::new(Marks::new(&self.marks(choices))))).unwrap();
        let replays = run.replays.iter().map(|&(node, count)| {
            let node = &self.trace.nodes()[node];
            count as f64 * seconds(node.flops, node.traffic)
        });
        let cost = replays.sum::<f64>() + seconds(0, run.quantize_traffic);
        (run, cost)
    }

    /// Where in backward each value is first read, and where its int8 store goes: one run each.
    fn find_places(&mut self, meter: &retape_core::MemoryMeter, reads: &[Vec<u64>]) {
        for item in (0..self.items.len()).filter(|&i| !reads[i].is_empty()) {
            let mut marks = self.all(Mark::Keep);
            marks[item].1 = Mark::Recompute;
            let log = Timeline::of(self.trace, meter, &marks);
            let replay = Moment { phase: Phase::Replay, node: self.items[item].sequence };
            let at = log.events.iter().position(|e| e.0.moment == replay).expect("it is replayed");
            let node = *reads[item].last().expect("it is read");
            let of_node = |e: &&(MemoryEvent, f64)| e.0.moment == Moment { phase: Phase::Backward, node };
            let events = log.events[..at].iter().filter(of_node).count();
            self.stops.push(Stop { item, place: Place { node, events } });
            if self.items[item].int8_bytes.is_some() {
                marks[item].1 = Mark::Int8(Int8Spec::default());
                let log = Timeline::of(self.trace, meter, &marks);
                let store = log.events.iter().find(|e| e.0.kind == Some(MemoryKind::Quantized)).expect("it is stored");
                let store = store.0.allocation;
                let end = log.events.iter().position(|e| e.0.allocation == store && e.0.kind.is_none()).expect("freed");
                let mut place = log.places()[end - log.backward];
                assert_eq!(place.node, reads[item][0], "an int8 store goes with its last read");
                // Dequantizing is an event that other marks don't have.
                place.events -= usize::from(reads[item].iter().all(|r| *r == reads[item][0]));
                self.items[item].int8_end = Some(place);
            }
        }
        self.stops.sort_by(|a, b| {
            if a.place.before(b.place) { std::cmp::Ordering::Less } else { std::cmp::Ordering::Greater }
        });
        for (at, pair) in self.stops.windows(2).enumerate() {
            assert!(pair[0].place.before(pair[1].place), "stops {at} and the next are at one place");
        }
        for (at, stop) in self.stops.iter().enumerate() {
            self.items[stop.item].stop = Some(at);
        }
    }

    fn key(variable: Variable) -> [usize; 4] {
        match variable {
            Variable::Recompute(i) => [0, i, 0, 0],
            Variable::Int8(i) => [1, i, 0, 0],
            Variable::Replayed(i, s) => [2, i, s, 0],
            Variable::Dequantized(i, s, c) => [3, i, s, c],
            Variable::Waits(i, s) => [4, i, s, 0],
            Variable::WaitsInt8(i, s) => [5, i, s, 0],
        }
    }

    fn variable(&self, variable: Variable) -> Option<Linear> {
        self.number.get(&Model::key(variable)).map(|&n| Linear::of(n))
    }

    fn declare(&mut self) {
        let stops = self.stops.len();
        let mut all = Vec::new();
        for (i, item) in self.items.iter().enumerate() {
            all.push(Variable::Recompute(i));
            all.extend(item.int8_bytes.map(|_| Variable::Int8(i)));
            let before_read = item.stop.unwrap_or(stops);
            if item.consumers.is_empty() {
                continue;
            }
            all.extend((0..before_read).map(|s| Variable::Replayed(i, s)));
            if item.int8_bytes.is_some() {
                let consumers = item.consumers.len();
                all.extend((0..before_read).flat_map(|s| (0..consumers).map(move |c| Variable::Dequantized(i, s, c))));
            }
            if item.stop.is_none() {
                all.extend((0..=stops).map(|s| Variable::Waits(i, s)));
                all.extend((0..=stops).filter(|_| item.int8_bytes.is_some()).map(|s| Variable::WaitsInt8(i, s)));
            }
        }
        self.number = all.iter().enumerate().map(|(n, &v)| (Model::key(v), n)).collect();
        self.variables = all;
    }

    fn recompute(&self, item: usize) -> Linear {
        self.variable(Variable::Recompute(item)).expect("each item has it")
    }

    fn int8(&self, item: usize) -> Linear {
        self.variable(Variable::Int8(item)).unwrap_or_default()
    }

    fn keep(&self, item: usize) -> Linear {
        Linear::constant(1.0).plus(-1.0, &self.recompute(item)).plus(-1.0, &self.int8(item))
    }

    /// Replayed when `passed` stops have passed.
    fn replayed(&self, item: usize, passed: usize) -> Linear {
        match (passed, self.items[item].stop) {
            (0, _) => Linear::default(),
            (_, Some(stop)) if passed > stop => self.recompute(item),
            _ => self.variable(Variable::Replayed(item, passed - 1)).unwrap_or_default(),
        }
    }

    /// Replayed at all.
    fn runs(&self, item: usize) -> Linear {
        self.replayed(item, self.stops.len())
    }

    /// Dequantized for a replay when `passed` stops have passed, at the last of them by one of the first `consumers`.
    fn dequantized(&self, item: usize, passed: usize, consumers: usize) -> Linear {
        let all = self.items[item].consumers.len();
        match (passed, consumers) {
            (0, _) => Linear::default(),
            (_, 0) => self.dequantized(item, passed - 1, all),
            _ => self.variable(Variable::Dequantized(item, passed - 1, consumers - 1)).unwrap_or_default(),
        }
    }

    fn state_rules(&mut self) {
        let mut rules = Vec::new();
        let at_least = |more: &Linear, less: &Linear| more.clone().plus(-1.0, less);
        let mut cost = Linear::default();
        for (i, item) in self.items.iter().enumerate() {
            cost.add(item.seconds, &self.runs(i));
            let (recompute, int8) = (self.recompute(i), self.int8(i));
            if let Some(bytes) = item.int8_bytes {
                rules.push(self.keep(i));
                let seconds = 2.0 * seconds(0, (item.bytes + bytes) as u64);
                match item.stop {
                    Some(_) => cost.add(seconds, &int8),
                    None => cost.add(seconds, &self.variable(Variable::WaitsInt8(i, 0)).unwrap_or_default()),
                }
            }
            for passed in 1..=item.stop.unwrap_or(self.stops.len()) {
                let replayed = self.replayed(i, passed);
                if replayed.terms.is_empty() {
                    continue;
                }
                rules.push(at_least(&recompute, &replayed));
                rules.push(at_least(&replayed, &self.replayed(i, passed - 1)));
                let mut any = Linear::default();
                for &consumer in &item.consumers {
                    let runs = self.replayed(consumer, passed);
                    any.add(1.0, &runs);
                    // It runs, and this isn't stored.
                    rules.push(at_least(
                        &replayed,
                        &runs.clone().plus(1.0, &recompute).plus(-1.0, &Linear::constant(1.0)),
                    ));
                }
                rules.push(at_least(&any, &replayed));
                if item.int8_bytes.is_none() {
                    continue;
                }
                for (c, &consumer) in item.consumers.iter().enumerate() {
                    let dequantized = self.dequantized(i, passed, c + 1);
                    let runs = self.replayed(consumer, passed);
                    let wanted = runs.clone().plus(1.0, &int8).plus(-1.0, &Linear::constant(1.0));
                    rules.push(at_least(&dequantized, &wanted));
                    rules.push(at_least(&dequantized, &self.dequantized(i, passed, c)));
                    rules.push(at_least(&int8, &dequantized));
                    if item.stop.is_none() {
                        rules.push(at_least(&runs, &dequantized));
                    }
                }
            }
            if item.stop.is_some() || item.consumers.is_empty() {
                continue;
            }
            for passed in 0..=self.stops.len() {
                let consumer = item.consumers[0];
                let yet = at_least(&self.runs(consumer), &self.replayed(consumer, passed));
                let waits = self.variable(Variable::Waits(i, passed)).expect("declared");
                rules.push(at_least(&waits, &yet.clone().plus(-1.0, &recompute).plus(-1.0, &int8)));
                if let Some(waits) = self.variable(Variable::WaitsInt8(i, passed)) {
                    rules.push(at_least(&waits, &yet.plus(1.0, &int8).plus(-1.0, &Linear::constant(1.0))));
                }
            }
        }
        self.rules = rules;
        self.cost = cost;
    }

    /// What is stored of an item when `passed` stops have passed, if it isn't read yet.
    fn stored(&self, item: usize, passed: usize) -> Linear {
        let (bytes, int8_bytes) = (self.items[item].bytes, self.items[item].int8_bytes.unwrap_or(0.0));
        let mut stored = Linear::default();
        if self.items[item].stop.is_some() {
            stored.add(bytes, &self.keep(item));
            stored.add(int8_bytes, &self.int8(item));
        } else {
            stored.add(bytes, &self.variable(Variable::Waits(item, passed)).unwrap_or_default());
            stored.add(int8_bytes, &self.variable(Variable::WaitsInt8(item, passed)).unwrap_or_default());
        }
        stored
    }

    /// In forward a value is there as long as its handle, then as its store. With all marks Recompute nothing is
    /// stored.
    fn forward_rows(&mut self, meter: &retape_core::MemoryMeter) {
        let log = Timeline::of(self.trace, meter, &self.all(Mark::Recompute));
        for item in &mut self.items {
            let replay = Moment { phase: Phase::Replay, node: item.sequence };
            let mut events = (log.backward..log.events.len()).filter(|&e| log.events[e].0.moment == replay);
            if let Some(first) = events.next() {
                let most = events.map(|e| log.events[e].1).fold(log.events[first].1, f64::max);
                item.takes = most - log.before(first);
            }
        }
        let mut gone: HashMap<usize, usize> = HashMap::new();
        for (i, item) in self.items.iter().enumerate() {
            let made = Moment { phase: Phase::Forward, node: item.sequence };
            let output = self.trace.values()[item.value].output;
            let allocations = log.events.iter().filter(|e| e.0.moment == made && e.0.kind.is_some());
            let own = allocations.map(|e| e.0).nth(output).expect("its node takes its memory");
            assert_eq!(own.bytes as f64, item.bytes, "output {output} of its node");
            let ends = |e: &(MemoryEvent, f64)| e.0.allocation == own.allocation && e.0.kind.is_none();
            let end = log.events.iter().position(ends).expect("it ends");
            if end < log.backward {
                gone.insert(i, end);
            }
        }
        for (at, (event, live)) in log.events[..log.backward].iter().enumerate() {
            let stored = |row: &mut Linear| {
                gone.iter().filter(|(_, end)| **end < at).for_each(|(&i, _)| row.add(1.0, &self.stored(i, 0)));
            };
            let mut row = Linear::constant(*live);
            match gone.iter().find(|(_, end)| **end == at) {
                // Its int8 store is taken while it is still there.
                Some((&i, _)) if self.items[i].int8_bytes.is_some() => {
                    row.constant += self.items[i].bytes;
                    let store = self.stored(i, 0).plus(-self.items[i].bytes, &self.kept_for(i));
                    row.add(1.0, &store);
                }
                _ if event.kind.is_some() => {}
                _ => continue,
            }
            stored(&mut row);
            self.rows.push(row);
        }
    }

    /// Whether an item is kept in full when forward ends.
    fn kept_for(&self, item: usize) -> Linear {
        match self.items[item].stop {
            Some(_) => self.keep(item),
            None => self.variable(Variable::Waits(item, 0)).unwrap_or_default(),
        }
    }

    /// Of moments that differ in nothing that marks decide, only the highest counts.
    fn drop_rows_below_others(&mut self) {
        let mut highest: HashMap<Vec<(usize, u64)>, Linear> = HashMap::new();
        for mut row in std::mem::take(&mut self.rows) {
            row.terms.retain(|_, factor| *factor != 0.0);
            let key = row.terms.iter().map(|(&v, f)| (v, f.to_bits())).collect();
            let known = highest.entry(key).or_insert_with(|| row.clone());
            known.constant = known.constant.max(row.constant);
        }
        self.rows = highest.into_values().collect();
        self.rows.sort_by(|a, b| a.constant.total_cmp(&b.constant).then_with(|| a.terms.keys().cmp(b.terms.keys())));
    }

    /// Items that aren't read yet at a place, and all int8 stores: what is there of them when `passed` stops have
    /// passed.
    fn open_at(&self, passed: usize, place: Place, except: Option<usize>) -> Linear {
        let mut sum = Linear::default();
        for (i, item) in self.items.iter().enumerate().filter(|(i, _)| Some(*i) != except) {
            match item.stop {
                Some(stop) if stop < passed => {
                    if item.int8_end.is_some_and(|end| place.before(end)) {
                        sum.add(item.int8_bytes.unwrap_or(0.0), &self.int8(i));
                    }
                }
                Some(_) => {
                    sum.add(1.0, &self.stored(i, passed));
                    sum.add(item.bytes, &self.replayed(i, passed));
                    sum.add(item.bytes, &self.dequantized(i, passed, item.consumers.len()));
                }
                None => sum.add(1.0, &self.stored(i, passed)),
            }
        }
        sum
    }

    /// With all marks Keep every item is there until its first read, and that is taken off.
    fn backward_rows(&mut self, meter: &retape_core::MemoryMeter) {
        let log = Timeline::of(self.trace, meter, &self.all(Mark::Keep));
        let places = log.places();
        let place_of = |at: usize| places[at - log.backward];
        let unread = |passed: usize| -> f64 {
            self.items.iter().filter(|i| i.stop.is_some_and(|s| s >= passed)).map(|i| i.bytes).sum()
        };
        let mut rows = Vec::new();
        for at in log.backward..log.events.len() {
            let (event, live) = log.events[at];
            if event.kind.is_none() {
                continue;
            }
            // An event at a stop's own place comes after the read.
            let place = place_of(at);
            let passed = self.stops.partition_point(|s| !place.before(s.place));
            rows.push(Linear::constant(live - unread(passed)).plus(1.0, &self.open_at(passed, place, None)));
        }
        for (at, stop) in self.stops.iter().enumerate() {
            let event =
                (log.backward..log.events.len()).find(|&e| !place_of(e).before(stop.place)).unwrap_or(log.events.len());
            let base = log.before(event) - unread(at);
            rows.extend(self.stop_rows(at, base));
        }
        self.rows.extend(rows);
    }

    /// The replays that may run at a stop, and dequantizing what is read there.
    fn stop_rows(&self, at: usize, base: f64) -> Vec<Linear> {
        let Stop { item: target, place } = self.stops[at];
        let mut rows = Vec::new();
        if let Some(int8_bytes) = self.items[target].int8_bytes {
            let own = &self.items[target];
            let mut row = Linear::constant(base).plus(1.0, &self.open_at(at, place, Some(target)));
            row.add(own.bytes + int8_bytes, &self.int8(target));
            row.add(own.bytes, &self.keep(target));
            row.add(own.bytes, &self.replayed(target, at));
            rows.push(row);
        }
        for replay in (0..=target).rev() {
            let runs = self.replayed(replay, at + 1).plus(-1.0, &self.replayed(replay, at));
            if runs.terms.is_empty() {
                continue;
            }
            let mut row = Linear::constant(base).plus(self.items[replay].takes, &runs);
            for (i, item) in self.items.iter().enumerate() {
                let earlier = item.sequence < self.items[replay].sequence;
                let replayed = |passed| self.replayed(i, passed);
                match item.stop {
                    Some(stop) if stop < at => {
                        if item.int8_end.is_some_and(|end| place.before(end)) {
                            row.add(item.int8_bytes.unwrap_or(0.0), &self.int8(i));
                        }
                    }
                    Some(_) => {
                        row.add(1.0, &self.stored(i, at));
                        row.add(item.bytes, &replayed(if earlier { at + 1 } else { at }));
                        let done = item.consumers.iter().take_while(|&&c| c <= replay).count();
                        row.add(item.bytes, &self.dequantized(i, at + 1, done));
                    }
                    None => {
                        let Some(&consumer) = item.consumers.first() else { continue };
                        row.add(1.0, &self.stored(i, if consumer < replay { at + 1 } else { at }));
                        if earlier && consumer >= replay {
                            row.add(item.bytes, &replayed(at + 1).plus(-1.0, &replayed(at)));
                        }
                        if consumer == replay {
                            let now = self.dequantized(i, at + 1, 1).plus(-1.0, &self.dequantized(i, at, 1));
                            row.add(item.bytes, &now);
                        }
                    }
                }
            }
            rows.push(row);
        }
        rows
    }

    /// What the variables are for these choices.
    pub fn values(&self, choices: &[Choice]) -> Vec<f64> {
        let mut values = vec![0.0; self.variables.len()];
        let stops = self.stops.len();
        for (i, item) in self.items.iter().enumerate().rev() {
            let is = |choice| f64::from(u8::from(choices[i] == choice));
            let (keep, recompute, int8) = (is(Choice::Keep), is(Choice::Recompute), is(Choice::Int8));
            let mut set = |variable: Variable, value: f64| {
                if let Some(&number) = self.number.get(&Model::key(variable)) {
                    values[number] = value;
                }
            };
            set(Variable::Recompute(i), recompute);
            set(Variable::Int8(i), int8);
            let mut dequantized = 0.0f64;
            for stop in 0..item.stop.unwrap_or(stops) {
                let runs: Vec<f64> = item.consumers.iter().map(|&c| self.replayed(c, stop + 1).at(&values)).collect();
                let mut set = |variable: Variable, value: f64| {
                    if let Some(&number) = self.number.get(&Model::key(variable)) {
                        values[number] = value;
                    }
                };
                set(Variable::Replayed(i, stop), recompute * runs.iter().copied().fold(0.0, f64::max));
                for (c, &runs) in runs.iter().enumerate() {
                    dequantized = dequantized.max(int8 * runs);
                    set(Variable::Dequantized(i, stop, c), dequantized);
                }
            }
            for passed in (0..=stops).filter(|_| item.stop.is_none() && !item.consumers.is_empty()) {
                let consumer = item.consumers[0];
                let yet = self.runs(consumer).at(&values) - self.replayed(consumer, passed).at(&values);
                for (variable, value) in
                    [(Variable::Waits(i, passed), keep * yet), (Variable::WaitsInt8(i, passed), int8 * yet)]
                {
                    if let Some(&number) = self.number.get(&Model::key(variable)) {
                        values[number] = value;
                    }
                }
            }
        }
        values
    }

    /// Peak and cost by this model.
    pub fn predict(&self, choices: &[Choice]) -> (f64, f64) {
        let values = self.values(choices);
        for rule in &self.rules {
            assert!(rule.at(&values) > -1e-9, "the values of fixed marks break a rule");
        }
        (self.rows.iter().map(|row| row.at(&values)).fold(0.0, f64::max), self.cost.at(&values))
    }
}

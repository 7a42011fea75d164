//! `retape timeline`: memory over one step, by a dry run on the meta device, as a page.

use crate::args::{Attention, Common, TimelineArgs};
use crate::error::{Failure, Result};
use crate::page::Page;
use crate::planning::Planning;
use crate::policy::NamedPolicy;
use crate::report::{self, bytes, without_numbers};
use crate::subject::MetaModel;
use crate::trainer::Batcher;
use crate::{model, subject};
use retape::MemoryKind;
use retape::nn::{Gpt, GptConfig};
use retape::prelude::Tape;
use retape::{KindBytes, Moment, Phase, TapeNames, Timeline};
use serde_json::{Map, Value, json};

/// A step's memory, with the names of what took it.
struct Recording {
    timeline: Timeline,
    names: TapeNames,
    saved_bytes: u64,
}

/// Runs the command.
pub fn run(args: &TimelineArgs, common: &Common) -> Result<()> {
    if args.out.is_none() && !common.json {
        return Err(Failure::usage("timeline needs --out FILE.html for the page, or --json for the figures"));
    }
    let config = GptConfig { attention: args.model.form("timeline")?, ..args.model.config()? };
    let spec = args.budget.or_policy(args.policy.as_deref(), &args.marks.marks)?;
    let policy = Planning::new(&MetaModel::new(&config)?, common).policy(&spec)?;
    let recording = record(&config, &policy, common)?;
    let document = document(&recording, args.model.name(), &config, &policy)?;
    if let Some(file) = &args.out {
        let page =
            Page::Timeline.fill(&format!("retape timeline: {}, {}", args.model.name(), policy.label()), &document)?;
        std::fs::write(file, page)
            .map_err(|e| Failure::usage(format!("--out {}: can't write this file: {e}", file.display())))?;
    }
    if common.json {
        report::print_line(&document.to_string())?;
    } else {
        print(&document)?;
    }
    match &args.out {
        Some(file) => report::note(&format!("wrote {}", file.display())),
        None => report::note("add --out FILE.html to write the page"),
    }
    Ok(())
}

fn record(config: &GptConfig, policy: &NamedPolicy, common: &Common) -> Result<Recording> {
    let device = retape::meta();
    let meter = device.meter();
    meter.set_limit(common.memory_limit);
    meter.set_logging(true);
    let seed = common.seed.unwrap_or(0);
    let model = Gpt::new(&device, config, seed)?;
    let (tokens, targets) = Batcher::first(&device, config, seed)?;
    let before = meter.take_log();
    meter.reset_peak();
    let tape = Tape::with(&device, subject::options(policy, seed));
    let loss = model.loss(&tape, &tokens, &targets)?;
    let (names, saved_bytes) = (tape.names(), tape.saved_bytes());
    let gradients = tape.backward(&loss)?;
    let timeline = Timeline::replay(&before, &meter.take_log());
    drop(gradients);
    if timeline.peak_bytes() != meter.step_peak() {
        let (timeline, meter) = (timeline.peak_bytes(), meter.step_peak());
        return Err(Failure::internal(format!("the timeline's peak is {timeline} bytes, and the meter's {meter}")));
    }
    Ok(Recording { timeline, names, saved_bytes })
}

fn phase(moment: Moment) -> &'static str {
    match moment.phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Replay => "replay",
    }
}

/// The kinds that there is anything of.
fn by_kind(live: &KindBytes) -> Map<String, Value> {
    let some = MemoryKind::ALL.into_iter().filter(|&kind| live[kind] > 0);
    some.map(|kind| (kind.name().to_owned(), live[kind].into())).collect()
}

/// What `--json` prints and the page holds.
fn document(recording: &Recording, name: &str, config: &GptConfig, policy: &NamedPolicy) -> Result<Value> {
    let Recording { timeline, names, saved_bytes } = recording;
    let attention = match config.attention.name() {
        "flash" => Attention::Flash,
        _ => Attention::Explicit,
    };
    let at = |moment: Moment| {
        let node = names.node(moment);
        let mut object = Map::new();
        object.insert("phase".into(), phase(moment).into());
        object.insert("path".into(), node.map(|n| n.path.as_str()).into());
        object.insert("op".into(), node.map(|n| n.op).into());
        object
    };
    let points = timeline.points();
    let mut moments = Vec::new();
    let mut moment_of = Vec::with_capacity(points.len());
    for run in points.chunk_by(|a, b| a.moment == b.moment) {
        let highest = run.iter().map(|p| p.bytes).max_by_key(KindBytes::step).unwrap_or_default();
        let mut moment = at(run[0].moment);
        moment.insert("events".into(), run.len().into());
        moment.insert("highest_bytes".into(), highest.step().into());
        moment.insert("bytes".into(), by_kind(&highest).into());
        moment_of.extend(std::iter::repeat_n(moments.len(), run.len()));
        moments.push(moment);
    }
    // Each event moves bytes from one kind to another, or from or to none: -1.
    let (mut from, mut to, mut moved) = (Vec::new(), Vec::new(), Vec::new());
    let mut last = timeline.before();
    for point in points {
        let kinds = || MemoryKind::ALL.into_iter().enumerate();
        let less = kinds().find(|&(_, kind)| point.bytes[kind] < last[kind]);
        let more = kinds().find(|&(_, kind)| point.bytes[kind] > last[kind]);
        let index = |kind: Option<(usize, MemoryKind)>| kind.map_or(-1, |(i, _)| i as i64);
        from.push(index(less));
        to.push(index(more));
        moved.push(less.or(more).map_or(0, |(_, kind)| point.bytes[kind].abs_diff(last[kind])));
        last = point.bytes;
    }
    let peak = timeline.peak().map(|event| {
        let mut peak = at(points[event].moment);
        peak.insert("event".into(), event.into());
        peak.insert("moment".into(), moment_of[event].into());
        peak.insert("bytes".into(), by_kind(&points[event].bytes).into());
        peak
    });
    let before = MemoryKind::ALL.map(|kind| (kind.name().to_owned(), timeline.before()[kind].into()));
    Ok(json!({
        "model": model::to_json(name, config, attention)?,
        "attention": config.attention.name(),
        "policy": policy.label(),
        "device": "meta",
        "peak_bytes": timeline.peak_bytes(),
        "saved_bytes": saved_bytes,
        "peak": peak.map_or_else(|| json!({ "event": null }), Value::Object),
        "contents": contents(timeline, names),
        "kinds": MemoryKind::ALL.map(MemoryKind::name),
        "before": Map::from_iter(before),
        "moments": moments,
        "events": { "from": from, "to": to, "bytes": moved },
    }))
}

/// What is live at the peak, the pieces of one value together.
fn contents(timeline: &Timeline, names: &TapeNames) -> Vec<Value> {
    let mut contents: Vec<(Option<&str>, &str, MemoryKind, u64)> = Vec::new();
    for piece in timeline.contents() {
        let (path, what) = names.describe(piece);
        let same = |(p, w, k, _): &&mut (Option<&str>, &str, MemoryKind, u64)| (*p, *w, *k) == (path, what, piece.kind);
        match contents.iter_mut().find(same) {
            Some((.., bytes)) => *bytes += piece.bytes,
            None => contents.push((path, what, piece.kind, piece.bytes)),
        }
    }
    contents.sort_by_key(|c| std::cmp::Reverse(c.3));
    let object = |(path, what, kind, bytes): (Option<&str>, &str, MemoryKind, u64)| {
        json!({
            "path": path,
            "what": what,
            "kind": kind.name(),
            "bytes": bytes,
        })
    };
    contents.into_iter().map(object).collect()
}

fn print(document: &Value) -> Result<()> {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let peak = &document["peak"];
    report::print_line(&format!(
        "{} under {}, {} attention: peak of the step {}, in {} of {}",
        text(&document["model"]["name"]),
        text(&document["policy"]),
        text(&document["attention"]),
        bytes(number(&document["peak_bytes"])),
        text(&peak["phase"]),
        text(&peak["path"]),
    ))?;
    let mut groups: Vec<(String, String, u64, u64)> = Vec::new();
    for item in document["contents"].as_array().into_iter().flatten() {
        let (path, what) = (without_numbers(&text(&item["path"])), text(&item["what"]));
        match groups.iter_mut().find(|g| (&g.0, &g.1) == (&path, &what)) {
            Some(group) => (group.2, group.3) = (group.2 + 1, group.3 + number(&item["bytes"])),
            None => groups.push((path, what, 1, number(&item["bytes"]))),
        }
    }
    groups.sort_by_key(|g| std::cmp::Reverse(g.3));
    let mut table = report::table(&["pieces", "live at the peak", "what it is", "bytes"], &[1, 2]);
    for (path, what, pieces, total) in groups {
        table.add_row([pieces.to_string(), path, what, bytes(total)]);
    }
    report::print_line(&table.to_string())
}

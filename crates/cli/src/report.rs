//! Output: lines on stdout, notes on stderr, tables, numbers for people.

use crate::error::{Failure, Result};
use comfy_table::{Cell, CellAlignment, Table, TableComponent, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write};
use std::time::Duration;

/// Writes text to stdout. A reader that went away (`| head`) ends the program quietly.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.map_err(|e| Failure::other(format!("can't write to stdout: {e}"))),
    }
}

/// Writes a line to stdout.
pub fn print_line(line: &str) -> Result<()> {
    print(&format!("{line}\n"))
}

/// Writes a line to stderr. Where even that fails there is nobody to tell.
pub fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A progress bar of `steps` on stderr; hidden where that isn't a terminal.
pub fn progress(steps: u64) -> ProgressBar {
    let target =
        if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(steps), target);
    match ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A table with these columns; those not in `left` are numbers.
pub fn table(columns: &[&str], left: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(columns.to_vec());
    for rule in [TableComponent::HeaderLines, TableComponent::MiddleHeaderIntersections] {
        table.set_style(rule, '─');
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if !left.contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Names and figures, a row each.
pub fn pairs(rows: impl IntoIterator<Item = (&'static str, String)>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    for (name, figure) in rows {
        table.add_row([Cell::new(name), Cell::new(figure).set_alignment(CellAlignment::Right)]);
    }
    table
}

/// A path with `*` for each segment that is a number.
pub fn without_numbers(path: &str) -> String {
    let star = |segment| if str::parse::<u64>(segment).is_ok() { "*" } else { segment };
    path.split('.').map(star).collect::<Vec<_>>().join(".")
}

/// A text's first characters, with a mark where more were.
pub fn shortened(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Bytes for people: `12.3 MiB`.
pub fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// A count for people: `12.3 M`.
pub fn count(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["", " k", " M", " G", " T", " P"] {
        if value < 1000.0 {
            return if unit.is_empty() { count.to_string() } else { format!("{value:.1}{unit}") };
        }
        value /= 1000.0;
    }
    format!("{value:.1} E")
}

/// A figure with `digits` decimals, or a dash if it is absent.
pub fn figure(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".into(), |v| format!("{v:.digits$}"))
}

/// Milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The lower and the upper quartile. None of fewer than four.
pub fn quartiles(values: impl IntoIterator<Item = f64>) -> Option<[f64; 2]> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
    (values.len() >= 4).then(|| [at(0.25), at(0.75)])
}

/// The middle value, or the mean of the two in the middle. `None` if there are no values.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

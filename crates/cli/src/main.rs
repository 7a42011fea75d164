//! `retape`: the command line. `cargo run --release` without arguments measures the frontier of the default model.

mod args;
mod chart;
mod checkpoint;
mod diff;
mod error;
mod frontier;
mod frontier_page;
mod inspect;
mod labels;
mod line;
mod measure;
mod model;
mod page;
mod plan;
mod planning;
mod policy;
mod process;
mod report;
mod resident;
mod step;
mod subject;
mod timeline;
mod train;
mod trainer;

use args::{Cli, Command};
use clap::Parser;
use error::{Failure, Result};
use std::process::ExitCode;

fn main() -> ExitCode {
    match parse().and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report::note(&format!("error: {failure}"));
            ExitCode::from(failure.status)
        }
    }
}

/// The command, or one line about what is wrong with it. Help and version are printed here.
fn parse() -> Result<Option<Cli>> {
    let error = match Cli::try_parse() {
        Ok(cli) => return Ok(Some(cli)),
        Err(error) => error,
    };
    let text = error.to_string();
    if !error.use_stderr() {
        report::print(&text)?;
        return Ok(None);
    }
    let lines =
        text.lines().take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let line = lines.map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    Err(Failure::usage(format!("{}; see `retape --help`", line.trim_start_matches("error: "))))
}

fn run(cli: Option<Cli>) -> Result<()> {
    let Some(Cli { command, common }) = cli else { return Ok(()) };
    match command.unwrap_or_default() {
        Command::Frontier(args) => frontier::run(&args, &common),
        Command::Step(args) => step::run(&args, &common),
        Command::Inspect(args) => inspect::run(&args, &common),
        Command::Plan(args) => plan::run(&args, &common),
        Command::Timeline(args) => timeline::run(&args, &common),
        Command::Train(args) => train::run(&args, &common),
    }
}

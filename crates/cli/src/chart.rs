//! The frontier as a picture: peak bytes against overhead, a labelled point per policy.

use crate::error::{Failure, Result};
use crate::frontier::Point;
use crate::labels::{Rect, place};
use plotters::coord::Shift;
use plotters::prelude::*;

const SIZE: (u32, u32) = (1120, 700);
const FONT: &str = "sans-serif";
/// Width of a character of the labels' font, about.
const CHARACTER: f64 = 6.4;
const LINE: f64 = 14.0;
const GREY: RGBColor = RGBColor(90, 90, 90);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A form of attention's colour and name.
fn series(attention: &str) -> (RGBColor, &'static str) {
    if attention == "flash" {
        (RGBColor(0, 114, 178), "tiled attention (flash)")
    } else {
        (RGBColor(200, 80, 0), "explicit attention")
    }
}

/// Points that lie on each other, under one label.
struct Spot<'a> {
    at: (f64, f64),
    points: Vec<&'a Point>,
}

impl Spot<'_> {
    fn lines(&self) -> Vec<String> {
        self.points.iter().map(|p| p.line.label()).collect()
    }
}

/// The picture as SVG.
pub fn svg(points: &[Point], title: &str) -> Result<String> {
    let mut text = String::new();
    draw(&mut text, points, title).map_err(|e| Failure::other(format!("drawing the chart: {e}")))?;
    Ok(text)
}

fn mebibytes(point: &Point) -> f64 {
    point.line.peak_bytes as f64 / f64::from(1 << 20)
}

fn draw(text: &mut String, points: &[Point], title: &str) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let overheads = || points.iter().flat_map(|p| [p.overhead(), p.line.predicted_overhead_percent]);
    let highest = overheads().fold(5.0, f64::max);
    let lowest = overheads().fold(0.0, f64::min);
    let margin = 0.12 * (highest - lowest);
    let right = points.iter().map(mebibytes).fold(0.0, f64::max) * 1.12;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .margin_top(76)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..right.max(f64::MIN_POSITIVE), lowest - margin..highest + margin)?;
    chart
        .configure_mesh()
        .x_desc("peak of the step, MiB (parameters and gradients apart)")
        .y_desc("overhead against none of the same attention, %")
        .axis_desc_style((FONT, 14))
        .label_style((FONT, 12))
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(228, 228, 228))
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()?;
    let pixel = |x: f64, y: f64| {
        let (x, y) = chart.backend_coord(&(x, y));
        (f64::from(x), f64::from(y))
    };
    let (xs, ys) = chart.plotting_area().get_pixel_range();
    let frame = Rect { left: xs.start.into(), top: ys.start.into(), right: xs.end.into(), bottom: ys.end.into() };

    let mut spots: Vec<Spot<'_>> = Vec::new();
    let mut obstacles = Vec::new();
    for point in points {
        let (colour, _) = series(point.line.attention);
        let round = point.line.attention == "flash";
        let at = pixel(mebibytes(point), point.overhead());
        let predicted = pixel(mebibytes(point), point.line.predicted_overhead_percent);
        if point.overhead_percent.is_some() {
            line(&root, at, predicted, colour.mix(0.35))?;
            marker(&root, at, round, colour.filled())?;
            obstacles.push(Rect::around(at, 6.0));
        }
        marker(&root, predicted, round, colour.stroke_width(1))?;
        obstacles.push(Rect::around(predicted, 6.0));
        let near = |spot: &&mut Spot<'_>| {
            spot.points[0].line.attention == point.line.attention && (spot.at.0 - at.0).hypot(spot.at.1 - at.1) < 10.0
        };
        match spots.iter_mut().find(near) {
            Some(spot) => spot.points.push(point),
            None => spots.push(Spot { at, points: vec![point] }),
        }
    }
    let size = |spot: &Spot<'_>| {
        let longest = spot.lines().iter().map(|l| l.chars().count()).max().unwrap_or(0);
        (CHARACTER * longest as f64 + 4.0, LINE * spot.points.len() as f64)
    };
    let anchors: Vec<_> = spots.iter().map(|spot| (spot.at, size(spot))).collect();
    for (spot, rect) in spots.iter().zip(place(&anchors, &obstacles, &frame)) {
        let (colour, _) = series(spot.points[0].line.attention);
        let end = rect.nearest(spot.at);
        if (end.0 - spot.at.0).hypot(end.1 - spot.at.1) > 14.0 {
            line(&root, spot.at, end, colour.mix(0.6))?;
        }
        for (i, label) in spot.lines().into_iter().enumerate() {
            let at = (rect.left as i32 + 2, (rect.top + LINE * i as f64) as i32);
            root.draw(&Text::new(label, at, (FONT, 12).into_font().color(&colour)))?;
        }
    }
    legend(&root, points, title)?;
    root.present()?;
    Ok(())
}

fn legend(root: &Area<'_>, points: &[Point], title: &str) -> Result<(), Box<dyn std::error::Error>> {
    let measured = points.iter().any(|p| p.overhead_percent.is_some());
    let title = format!("{title}: memory against time");
    root.draw(&Text::new(title, (20, 12), (FONT, 20).into_font().color(&BLACK)))?;
    let mut x = 26;
    let mut entry = |draw: &dyn Fn((f64, f64)) -> Result<(), Box<dyn std::error::Error>>, text: &str| {
        draw((f64::from(x), 54.0))?;
        root.draw(&Text::new(text.to_owned(), (x + 12, 47), (FONT, 13).into_font().color(&GREY)))?;
        x += 34 + (7.2 * text.len() as f64) as i32;
        Ok::<_, Box<dyn std::error::Error>>(())
    };
    for attention in ["flash", "explicit"] {
        if points.iter().any(|p| p.line.attention == attention) {
            let (colour, name) = series(attention);
            entry(&|at| marker(root, at, attention == "flash", colour.filled()), name)?;
        }
    }
    if measured {
        let gpu = points.iter().any(|p| p.line.device.starts_with("cuda"));
        let clock = if gpu { "measured: time" } else { "measured: CPU time" };
        entry(&|at| marker(root, at, true, GREY.filled()), clock)?;
    }
    entry(&|at| marker(root, at, true, GREY.stroke_width(1)), "predicted by the dry run: FLOPs")
}

fn marker(
    root: &Area<'_>,
    (x, y): (f64, f64),
    round: bool,
    style: ShapeStyle,
) -> Result<(), Box<dyn std::error::Error>> {
    let (x, y) = (x.round() as i32, y.round() as i32);
    if round {
        root.draw(&Circle::new((x, y), 5, style))?;
    } else {
        root.draw(&Rectangle::new([(x - 4, y - 4), (x + 4, y + 4)], style))?;
    }
    Ok(())
}

fn line(
    root: &Area<'_>,
    from: (f64, f64),
    to: (f64, f64),
    colour: RGBAColor,
) -> Result<(), Box<dyn std::error::Error>> {
    let path = [from, to].map(|(x, y)| (x.round() as i32, y.round() as i32));
    root.draw(&PathElement::new(path, colour.stroke_width(1)))?;
    Ok(())
}

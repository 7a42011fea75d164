//! Places labels beside points so that they hide neither each other nor a point.

/// A position or a size in pixels.
pub type Pair = (f64, f64);

/// A rectangle in pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rect {
    pub left: f64,
    pub top: f64,
    pub right: f64,
    pub bottom: f64,
}

impl Rect {
    /// A square around a point.
    pub fn around((x, y): Pair, half: f64) -> Rect {
        Rect { left: x - half, top: y - half, right: x + half, bottom: y + half }
    }

    /// Area that both cover.
    fn overlap(&self, other: &Rect) -> f64 {
        let width = self.right.min(other.right) - self.left.max(other.left);
        let height = self.bottom.min(other.bottom) - self.top.max(other.top);
        width.max(0.0) * height.max(0.0)
    }

    /// Area of this that lies outside `frame`.
    fn outside(&self, frame: &Rect) -> f64 {
        (self.right - self.left) * (self.bottom - self.top) - self.overlap(frame)
    }

    /// The point of the rectangle that is nearest to another.
    pub fn nearest(&self, (x, y): Pair) -> Pair {
        (x.clamp(self.left, self.right), y.clamp(self.top, self.bottom))
    }
}

/// A rectangle for each anchor (a point and the size that its label needs), inside `frame`, off `obstacles` and off
/// each other. Anchors in a crowd come last and look farther. Where there is no free place, the one that hides least is
/// taken.
pub fn place(anchors: &[(Pair, Pair)], obstacles: &[Rect], frame: &Rect) -> Vec<Rect> {
    let crowd = |&(x, y): &Pair| {
        let near = |(other, _): &&(Pair, Pair)| (other.0 - x).hypot(other.1 - y) < 60.0;
        anchors.iter().filter(near).count()
    };
    let mut order: Vec<usize> = (0..anchors.len()).collect();
    order.sort_by_key(|&i| crowd(&anchors[i].0));
    let mut placed: Vec<Option<Rect>> = vec![None; anchors.len()];
    for i in order {
        let (at, size) = anchors[i];
        let cost = |rect: &Rect| {
            let hidden: f64 = obstacles.iter().chain(placed.iter().flatten()).map(|o| rect.overlap(o)).sum();
            hidden + 4.0 * rect.outside(frame)
        };
        let mut best: Option<(f64, Rect)> = None;
        for candidate in candidates(at, size) {
            let cost = cost(&candidate);
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, candidate));
            }
            if cost == 0.0 {
                break;
            }
        }
        placed[i] = best.map(|(_, rect)| rect);
    }
    placed.into_iter().zip(anchors).map(|(rect, &(at, _))| rect.unwrap_or(Rect::around(at, 0.0))).collect()
}

/// Rectangles around a point, the nearest first, and to its right before elsewhere.
fn candidates((x, y): Pair, (width, height): Pair) -> impl Iterator<Item = Rect> {
    const AROUND: usize = 24;
    let radii = (0..16).map(|i| 9.0 + 11.0 * f64::from(i));
    radii.flat_map(move |radius| {
        (0..AROUND).map(move |i| {
            // 0, +1, -1, +2, ..: steps away from "to the right".
            let step = if i % 2 == 1 { i.div_ceil(2) as f64 } else { -(i as f64 / 2.0) };
            let angle = step * std::f64::consts::TAU / AROUND as f64;
            let (dx, dy) = (angle.cos(), angle.sin());
            // The rectangle's centre lies so far out that its nearest edge is `radius` away.
            let left = x + dx * radius + (dx - 1.0) / 2.0 * width;
            let top = y + dy * radius + (dy - 1.0) / 2.0 * height;
            Rect { left, top, right: left + width, bottom: top + height }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_a_crowd_are_apart() {
        let frame = Rect { left: 0.0, top: 0.0, right: 1000.0, bottom: 600.0 };
        let anchors: Vec<_> = (0..12)
            .map(|i| ((480.0 + 7.0 * f64::from(i % 4), 300.0 + 9.0 * f64::from(i / 4)), (110.0, 14.0)))
            .collect();
        let points: Vec<Rect> = anchors.iter().map(|&(at, _)| Rect::around(at, 5.0)).collect();
        let placed = place(&anchors, &points, &frame);
        for (i, rect) in placed.iter().enumerate() {
            assert_eq!(rect.outside(&frame), 0.0);
            assert!(points.iter().all(|p| rect.overlap(p) == 0.0), "{rect:?} hides a point");
            assert!(placed[..i].iter().all(|other| rect.overlap(other) == 0.0), "{rect:?} hides a label");
        }
    }
}

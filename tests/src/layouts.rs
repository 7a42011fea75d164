//! Layout arithmetic against a model that knows no strides: the list of the storage positions of all elements.

use crate::choices::Choices;
use retape_core::layout::{Layout, Shape, broadcast_shapes, contiguous_strides, element_count};
use retape_core::{DType, Device, Tensor, meta};

/// The positions in the storage of all elements, in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    shape: Vec<usize>,
    at: Vec<usize>,
}

/// Every index of a shape in row-major order.
fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    if shape.contains(&0) {
        return vec![]; // the other sizes may be huge
    }
    shape.iter().fold(vec![vec![]], |indices, &n| {
        indices.iter().flat_map(|index| (0..n).map(move |i| [&index[..], &[i]].concat())).collect()
    })
}

impl Model {
    fn contiguous(shape: &[usize]) -> Model {
        Model { shape: shape.to_vec(), at: (0..indices(shape).len()).collect() }
    }

    /// What the layout says, by its definition.
    pub fn of(layout: &Layout) -> Model {
        let position = |index: &Vec<usize>| {
            layout.offset + index.iter().zip(&layout.strides).map(|(i, stride)| i * stride).sum::<usize>()
        };
        Model { shape: layout.shape.to_vec(), at: indices(&layout.shape).iter().map(position).collect() }
    }

    fn get(&self, index: &[usize]) -> usize {
        let flat = index.iter().zip(&self.shape).fold(0, |flat, (i, n)| flat * n + i);
        self.at[flat]
    }

    /// The model of `shape` whose element at an index is this one's where `from` says.
    fn gather(&self, shape: Vec<usize>, from: impl Fn(&[usize]) -> Vec<usize>) -> Model {
        let at = indices(&shape).iter().map(|index| self.get(&from(index))).collect();
        Model { shape, at }
    }

    fn reshape(&self, shape: &[usize]) -> Option<Model> {
        let count = indices(shape).len();
        (count == self.at.len()).then(|| Model { shape: shape.to_vec(), at: self.at.clone() })
    }

    fn permute(&self, order: &[usize]) -> Option<Model> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if sorted != (0..self.shape.len()).collect::<Vec<_>>() {
            return None;
        }
        let shape = order.iter().map(|&d| self.shape[d]).collect();
        Some(self.gather(shape, |index| {
            let mut from = vec![0; order.len()];
            order.iter().zip(index).for_each(|(&d, &i)| from[d] = i);
            from
        }))
    }

    fn expand(&self, shape: &[usize]) -> Option<Model> {
        let lead = shape.len().checked_sub(self.shape.len())?;
        let fits = self.shape.iter().zip(&shape[lead..]).all(|(&own, &wanted)| own == wanted || own == 1);
        fits.then(|| {
            self.gather(shape.to_vec(), |index| {
                index[lead..].iter().zip(&self.shape).map(|(&i, &n)| if n == 1 { 0 } else { i }).collect()
            })
        })
    }

    fn slice(&self, dim: usize, start: usize, len: usize, step: usize) -> Option<Model> {
        let size = *self.shape.get(dim)?;
        let taken: Vec<usize> = (0..len).map(|i| start + i * step).collect();
        if step == 0 || start > size || taken.iter().any(|&i| i >= size) {
            return None;
        }
        let mut shape = self.shape.clone();
        shape[dim] = len;
        Some(self.gather(shape, |index| {
            let mut from = index.to_vec();
            from[dim] = taken[index[dim]];
            from
        }))
    }

    /// Whether some strides reach these positions.
    fn has_strides(&self) -> bool {
        let Some(&first) = self.at.first() else { return true };
        let stride = |d: usize| {
            let mut index = vec![0; self.shape.len()];
            if self.shape[d] == 1 {
                return Some(0);
            }
            index[d] = 1;
            self.get(&index).checked_sub(first)
        };
        let strides: Option<Vec<usize>> = (0..self.shape.len()).map(stride).collect();
        strides.is_some_and(|strides| {
            let at = |index: &Vec<usize>| first + index.iter().zip(&strides).map(|(i, s)| i * s).sum::<usize>();
            indices(&self.shape).iter().map(at).eq(self.at.iter().copied())
        })
    }

    fn is_contiguous(&self) -> bool {
        self.at.first().is_none_or(|&first| (first..first + self.at.len()).eq(self.at.iter().copied()))
    }
}

fn sizes(choices: &mut impl Choices) -> Vec<usize> {
    let rank = choices.pick(&[2, 1, 3, 0, 4, 5]);
    (0..rank).map(|_| choices.pick(&[2, 3, 1, 4, 1, 0, 5])).collect()
}

/// Another shape of about the same number of elements: neighbours merged or split, ones put in or taken out, a size
/// changed.
fn another(shape: &[usize], choices: &mut impl Choices) -> Vec<usize> {
    let mut shape = shape.to_vec();
    for _ in 0..choices.throw(4) {
        let d = choices.throw(shape.len() + 1);
        match choices.throw(6) {
            0 if d + 1 < shape.len() => {
                let next = shape.remove(d + 1);
                shape[d] *= next;
            }
            1 if d < shape.len() && shape[d] > 0 => {
                let factor = choices.pick(&[2, 3, 1, 4]);
                if shape[d].is_multiple_of(factor) {
                    shape[d] /= factor;
                    shape.insert(d, factor);
                }
            }
            2 if shape.len() < 6 => shape.insert(d, 1),
            3 if d < shape.len() && shape[d] == 1 => drop(shape.remove(d)),
            4 if d < shape.len() => shape[d] = choices.throw(6),
            _ => shape.sort_unstable(),
        }
    }
    shape
}

/// A layout after random views is what the model says, an error where the model has none, and a reshape needs a copy
/// exactly where no strides would do.
pub fn views(choices: &mut impl Choices) {
    let shape = sizes(choices);
    let (mut layout, mut model) = (Layout::contiguous(&shape), Model::contiguous(&shape));
    assert_eq!(element_count(&shape), Ok(model.at.len()));
    assert_eq!(contiguous_strides(&shape), layout.strides);
    for _ in 0..8 {
        let rank = layout.rank();
        let (what, new, expected) = match choices.throw(5) {
            0 => {
                let shape = another(&layout.shape, choices);
                let expected = model.reshape(&shape);
                let new = match layout.reshape(&shape) {
                    Ok(None) => {
                        let copy = expected.unwrap_or_else(|| panic!("{layout:?} as {shape:?} is no error"));
                        assert!(!copy.has_strides(), "{layout:?} as {shape:?} needs no copy");
                        continue;
                    }
                    Ok(Some(view)) => Ok(view),
                    Err(error) => Err(error),
                };
                (format!("reshape {shape:?}"), new, expected)
            }
            1 => {
                let mut order: Vec<usize> = (0..rank).collect();
                for i in 1..rank {
                    order.swap(i, choices.throw(i + 1));
                }
                match choices.throw(9) {
                    7 if rank > 0 => order[0] = rank - 1,
                    8 => order.push(rank),
                    _ => {}
                }
                (format!("permute {order:?}"), layout.permute(&order), model.permute(&order))
            }
            2 => {
                let mut shape: Vec<usize> =
                    layout.shape.iter().map(|&n| if n == 1 { choices.pick(&[1, 3, 0, 2]) } else { n }).collect();
                if choices.throw(3) == 0 && rank < 6 {
                    shape.insert(0, choices.pick(&[2, 1, 0]));
                }
                if choices.throw(9) == 8 {
                    shape = another(&shape, choices);
                }
                (format!("expand {shape:?}"), layout.expand(&shape), model.expand(&shape))
            }
            _ => {
                let (dim, start, len) = (choices.throw(rank.max(1)), choices.throw(4), choices.throw(5));
                let step = choices.pick(&[1, 2, 3, 1, 1, 0]);
                let new = layout.slice(dim, start, len, step);
                (format!("slice {dim} {start} {len} {step}"), new, model.slice(dim, start, len, step))
            }
        };
        match (new, expected) {
            (Ok(new), Some(expected)) if expected.at.len() < 2000 => {
                assert_eq!(Model::of(&new), expected, "{layout:?}, {what}");
                (layout, model) = (new, expected);
            }
            (Ok(_), Some(_)) | (Err(_), None) => {}
            (new, expected) => panic!("{layout:?}, {what}: {new:?}, the model says {expected:?}"),
        }
        assert_eq!(layout.len(), model.at.len());
        assert_eq!(layout.is_empty(), model.at.is_empty());
        assert_eq!(layout.is_contiguous(), model.is_contiguous(), "{layout:?}");
        let last = model.at.iter().max().map_or(0, |last| last + 1 - layout.offset);
        assert_eq!(layout.span(), last, "{layout:?}");
    }
}

/// Two shapes broadcast as they do when written with the same rank and compared by hand.
pub fn broadcasts(choices: &mut impl Choices) {
    let (a, b) = (sizes(choices), sizes(choices));
    let rank = a.len().max(b.len());
    let padded = |s: &[usize]| [vec![1; rank - s.len()], s.to_vec()].concat();
    let pairs: Vec<(usize, usize)> = padded(&a).into_iter().zip(padded(&b)).collect();
    let fits = pairs.iter().all(|&(x, y)| x == y || x == 1 || y == 1);
    let expected = fits.then(|| pairs.iter().map(|&(x, y)| if x == 1 { y } else { x }).collect::<Shape>());
    assert_eq!(broadcast_shapes(&a, &b), expected, "{a:?} and {b:?}");
    assert_eq!(broadcast_shapes(&b, &a), expected, "{b:?} and {a:?}");
}

/// `as_strided` takes what lies inside the storage, of any numbers, and nothing else.
pub fn windows(choices: &mut impl Choices) {
    let device: Device = meta();
    let elements = choices.throw(40);
    let storage = Tensor::uninit(&device, &[elements], DType::F32, retape_core::MemoryKind::Input).unwrap();
    let rank = choices.throw(4);
    let huge = [usize::MAX, 1 << 63, 1 << 40, (1 << 62) + 1, 1 << 32];
    let number = |choices: &mut dyn FnMut(usize) -> usize, sides| {
        if choices(8) == 7 { huge[choices(huge.len())] } else { choices(sides) }
    };
    let mut throw = |sides| choices.throw(sides);
    let shape: Vec<usize> = (0..rank).map(|_| number(&mut throw, 5)).collect();
    let strides: Vec<usize> = (0..rank).map(|_| number(&mut throw, 9)).collect();
    let offset = number(&mut throw, 12);
    let empty = shape.contains(&0);
    let last = shape.iter().zip(&strides).fold(offset as u128, |at, (&n, &s)| {
        at.saturating_add((n as u128).saturating_sub(1).saturating_mul(s as u128))
    });
    let count = shape.iter().fold(1u128, |count, &n| count.saturating_mul(n.max(1) as u128));
    let fits = count <= isize::MAX as u128 && (empty || last < elements as u128);
    match storage.as_strided(&shape, &strides, offset) {
        Ok(view) => {
            assert!(fits, "{shape:?}, {strides:?} from {offset} of {elements} was taken");
            assert_eq!((view.shape(), view.is_empty()), (&shape[..], empty));
            if count < 2000 {
                assert!(Model::of(view.layout()).at.iter().all(|&at| at < elements));
            }
            // Views of a view whose unused strides are huge: whatever they say, they don't leave the storage.
            for _ in 0..3 {
                let dim = choices.throw(rank.max(1));
                let (start, len, step) = (choices.throw(4), choices.throw(4), choices.pick(&[1, 2, usize::MAX]));
                let part = view.slice(dim, start, len, step);
                let flat = view.view_as(&[view.len()]).map(|v| v.unwrap_or_else(|| view.clone()));
                for view in part.iter().chain(&flat).filter(|v| v.len() < 2000) {
                    assert!(Model::of(view.layout()).at.iter().all(|&at| at < elements), "{view:?}");
                    assert!(view.layout().span() <= elements);
                }
            }
        }
        Err(error) => assert!(!fits, "{shape:?}, {strides:?} from {offset} of {elements}: {error}"),
    }
}

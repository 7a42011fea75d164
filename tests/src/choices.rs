//! Where the choices of a random test come from: a seed, or a string of bytes that a fuzzer or proptest makes (and
//! shortens, when it finds a failure).

use crate::programs::Dice;

/// A source of choices.
pub trait Choices {
    /// 0 .. sides - 1.
    fn throw(&mut self, sides: usize) -> usize;
    /// Whether all further choices are 0: a test may stop.
    fn is_over(&self) -> bool;
    /// One of these; the first where the source is over.
    fn pick<T: Copy>(&mut self, of: &[T]) -> T
    where
        Self: Sized,
    {
        of[self.throw(of.len())]
    }
}

impl Choices for Dice {
    fn throw(&mut self, sides: usize) -> usize {
        Dice::throw(self, sides)
    }
    fn is_over(&self) -> bool {
        false
    }
}

/// A byte per choice, and 0 where there are no more.
#[derive(Debug, Clone)]
pub struct Bytes<I>(I);

impl<'a> Bytes<std::iter::Copied<std::slice::Iter<'a, u8>>> {
    /// Reads from the start.
    pub fn new(bytes: &'a [u8]) -> Self {
        Bytes(bytes.iter().copied())
    }
}

impl<'a> Bytes<std::iter::Rev<std::iter::Copied<std::slice::Iter<'a, u8>>>> {
    /// Reads from the end: a second source out of the same bytes.
    pub fn from_the_end(bytes: &'a [u8]) -> Self {
        Bytes(bytes.iter().copied().rev())
    }
}

impl<I: ExactSizeIterator<Item = u8>> Choices for Bytes<I> {
    fn throw(&mut self, sides: usize) -> usize {
        self.0.next().map_or(0, |byte| byte as usize % sides)
    }
    fn is_over(&self) -> bool {
        self.0.len() == 0
    }
}

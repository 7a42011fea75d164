//! Faults that users of other engines reported in public, in our own words: the behaviour that is right here, over
//! every op, mark and preset to which a report applies. The number in a test's name is that of the report in its file's
//! table.

mod attention;
mod checkpointing;
mod gradients;
mod identity;
mod rows;

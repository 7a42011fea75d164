//! Embedding: y[.., :] = table[ids[..], :]. The gradient of the table is the sum of g's rows by id: the ids are put
//! in order, in a workspace, and each id's rows are summed in f64 and rounded once; the padding's row gets none.

use super::index::Gathered;
use super::*;
use crate::layout::dimension;
use crate::tape::Var;

/// Rows of a table `[vocabulary, size]` by integer ids. Inputs: table, ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Embedding {
    /// A row that is not learned: its gradient is 0.
    pub padding: Option<usize>,
}

impl OpRule for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn formula(&self) -> &'static str {
        "y[.., :] = table[ids[..], :]"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2, inputs)?;
        let dtype = one_float_dtype(&inputs[..1])?;
        if inputs[0].shape.len() != 2 || !matches!(inputs[1].dtype, DType::I64 | DType::I32) {
            return Err("needs a table [vocabulary, size] and ids of dtype i64 or i32".into());
        }
        if let Some(padding) = self.padding.filter(|&row| row >= inputs[0].shape[0]) {
            return Err(format!("the padding, row {padding}, is outside the table of {} rows", inputs[0].shape[0]));
        }
        let mut shape = inputs[1].shape.clone();
        shape.push(inputs[0].shape[1]);
        Ok(one(Spec::new(shape, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Embedding { table: &inputs[0], ids: &inputs[1], out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::In(1)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let ids = cx.saved(Slot::In(1))?;
        let sum = cx.sum(0)?;
        let padding = self.padding.map(|row| sum.tensor.narrow(0, row, 1)).transpose()?;
        if sum.is_new {
            let order = exec.workspace(&[ids.len()], DType::I64)?;
            exec.run(kernel::EmbeddingGrad { ids: &ids, g: &g, order: &order, out: &sum.tensor })?;
            return padding.map_or(Ok(()), |row| exec.run(kernel::Fill { value: 0.0, out: &row }));
        }
        // What other uses of the table have added to the padding's row stays.
        let others = padding.as_ref().map(|row| row.copy(MemoryKind::Workspace)).transpose()?;
        let rows = Gathered { dims: smallvec![0], at: 0 };
        let (view, ids) = rows.operands(&sum.tensor, &[ids])?;
        exec.scatter_add(&g, &[&ids[0]], false, 1.0, &view)?;
        match (padding, others) {
            (Some(row), Some(others)) => exec.run(kernel::Copy { x: &others, out: &row }),
            _ => Ok(()),
        }
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::moved(&inputs[1..], outputs) }
    }

    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let ids = SampleInput::integers;
        let s = |name, table, ids| Sample::smooth(name, Embedding { padding: None }, [table, ids]);
        vec![
            s("ordinary", x(1, &[5, 3]), ids(&[4], &[1, 0, 4, 2])),
            s("repeated ids", x(2, &[5, 3]), ids(&[2, 3], &[1, 1, 4, 1, 0, 4])),
            s("rank 0", x(3, &[5, 3]), ids(&[], &[2])),
            s("transposed table", x(4, &[4, 6]).lying(SampleMemory::Transposed), ids(&[2], &[3, 0])),
            s("no ids", x(5, &[5, 3]), ids(&[0], &[])),
            // Its gradient is 0 by definition, not by its finite difference.
            Sample::kink("padding", Embedding { padding: Some(2) }, [x(6, &[4, 3]), ids(&[3], &[1, 2, 2])]),
        ]
    }
}

impl Var {
    /// Rows of this table `[vocabulary, size]` by `ids` (i64 or i32) -> `[ids.., size]`. An id outside the table is an
    /// error. Backward reads the ids.
    pub fn embedding(self, ids: impl Into<Var>) -> Result<Var> {
        self.apply(Embedding { padding: None }, [ids.into()])
    }

    /// As [`embedding`](Var::embedding); row `padding` (negative counts from the end) gets no gradient.
    pub fn embedding_padded(self, ids: impl Into<Var>, padding: isize) -> Result<Var> {
        let rows = self.shape().first().copied().unwrap_or(0);
        let padding = dimension(padding, rows).map_err(|_| {
            self.invalid("embedding", format!("the padding, row {padding}, is outside the table of {rows} rows"))
        })?;
        self.apply(Embedding { padding: Some(padding) }, [ids.into()])
    }
}

// Rows of a table by id. A team of threads a row (rows.cuh). The gradient is a scatter-add: see indexing.cu.
#include "rows.cuh"

struct Embedding {
    RowPlan plan;
    Tensor table, ids, out;  // ids: a number for each row; they were checked
};

template <class C>
DEVICE void embedding(const Embedding& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> from(p.table, load_index(p.ids, p.ids.offset(r)), p.plan), out(p.out, r, p.plan);
        for (int64_t i = team.rank * PACK; i < out.width; i += int64_t(team.size) * PACK) {
            C x[PACK];
            from.read(i, C(0), x);
            out.write(i, x);
        }
    }
}
KERNEL embedding_f32(const Embedding p) { embedding<float>(p); }
KERNEL embedding_f64(const Embedding p) { embedding<double>(p); }

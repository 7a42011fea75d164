//! Who is who, for as long as the process runs, and what nobody may draw twice.

use retape_core::ops::attention::AttentionOptions;
use retape_core::{
    DType, Device, Error, Int8Spec, Mark, ParameterId, Result, Rounding, Tape, TapeOptions, Tensor, Var, meta,
};
use retape_nn::Parameter;
use retape_policy::{Rule, RuleSet};
use retape_tests::programs::Dice;
use retape_tests::random;
use std::collections::HashSet;
use std::rc::Rc;

fn cpu() -> Device {
    retape_cpu::device_with_threads(2).unwrap()
}

fn seeded(device: &Device, seed: u64) -> Tape {
    Tape::with(device, TapeOptions { seed: Some(seed), ..TapeOptions::default() })
}

/// What is made after a parameter has gone doesn't get its gradients, though it lies where that one lay.
#[test]
fn a_new_parameter_has_nothing_of_one_that_is_gone() {
    let device = cpu();
    let parameter = |value: f64| Parameter::new("p", Tensor::from_slice(&device, &[1], &[value]).unwrap()).unwrap();
    let mut ids = HashSet::new();
    for _ in 0..1000 {
        let tape = Tape::new(&device);
        let old = parameter(3.0);
        let loss = old.var(&tape).unwrap().square().unwrap().sum().unwrap();
        let old_id = old.id();
        drop(old);
        let new = parameter(5.0);
        let other = new.var(&tape).unwrap().scale(7.0).unwrap().sum().unwrap();
        assert!(ids.insert(old_id) && ids.insert(new.id()), "an id comes back");
        let gradients = tape.backward(&loss.add(&other).unwrap()).unwrap();
        let of = |id: ParameterId| gradients.parameter(id).unwrap().item().unwrap();
        assert_eq!((of(old_id), of(new.id())), (6.0, 7.0));
    }
}

/// What a case of [`owners_may_go_in_any_order`] owns.
enum Owned {
    Parameter(Parameter),
    Tensor(Tensor),
    Device(Device),
    Tape(Tape),
    Var(Var),
}

/// Parameters, tensors, devices and tapes go in any order between recording and backward, and others come.
#[test]
fn owners_may_go_in_any_order() {
    for seed in 0..400 {
        let mut dice = Dice::new(seed);
        let device = cpu();
        // Half of the cases hold nothing of the device but what lies on it.
        let watched = (dice.throw(2) == 0).then(|| device.clone());
        let mut owned: Vec<Owned> = Vec::new();
        let mut losses = Vec::new();
        let mut expected: Vec<(ParameterId, [f64; 2], usize)> = Vec::new();
        let mut parameters = Vec::new();
        for i in 0..3 {
            let tensor = random(&device, &[2], 10 * seed + i, DType::F64);
            let parameter = Parameter::new(format!("p{i}"), tensor.clone()).unwrap();
            parameters.push((parameter.clone(), tensor.to_vec::<f64>().unwrap()));
            owned.push(Owned::Tensor(tensor));
            owned.push(Owned::Parameter(parameter));
        }
        for t in 0..2 {
            // 0.5 sum p^2 + sum p h, where h is a leaf of no parameter.
            let tape = Tape::new(&device);
            let h = random(&device, &[2], 10 * seed + 7 + t as u64, DType::F64);
            let leaf = tape.leaf(&h).unwrap();
            let mut loss: Option<Var> = None;
            for (parameter, values) in &parameters {
                let p = parameter.var(&tape).unwrap();
                let term = p.clone().square().unwrap().scale(0.5).unwrap().add(p.clone().mul(&leaf).unwrap()).unwrap();
                let term = term.sum().unwrap();
                loss = Some(match loss {
                    Some(loss) => loss.add(&term).unwrap(),
                    None => term,
                });
                let h = h.to_vec::<f64>().unwrap();
                expected.push((parameter.id(), [values[0] + h[0], values[1] + h[1]], t));
                owned.push(Owned::Var(p));
            }
            losses.push((loss.unwrap(), t));
            owned.extend([Owned::Var(leaf), Owned::Tensor(h), Owned::Tape(tape)]);
        }
        drop(parameters);
        owned.push(Owned::Device(device));
        let mut results = Vec::new();
        while !owned.is_empty() || !losses.is_empty() {
            match dice.throw(8) {
                0 if !losses.is_empty() => {
                    let (loss, t) = losses.swap_remove(dice.throw(losses.len()));
                    let tape = loss.tape().clone();
                    results.push((tape.backward(&loss).unwrap(), t));
                    assert!(matches!(tape.backward(&loss), Err(Error::TapeConsumed { .. })));
                }
                // Something new, perhaps where the old one was.
                1 => {
                    let device = match owned.iter().find(|o| matches!(o, Owned::Device(_))) {
                        Some(Owned::Device(device)) if dice.throw(2) == 0 => device.clone(),
                        _ => cpu(),
                    };
                    let new = Parameter::new("new", random(&device, &[2], seed, DType::F64)).unwrap();
                    assert!(expected.iter().all(|(id, ..)| *id != new.id()));
                    if let Some((loss, _)) = losses.first() {
                        let mixed = new.var(loss.tape());
                        assert_eq!(mixed.is_ok(), loss.tape().device() == device, "{mixed:?}");
                    }
                    assert!(results.iter().all(|(g, _)| g.parameter(new.id()).is_none()));
                }
                2..5 if owned.len() > 4 => drop(owned.drain(..).skip(1 + dice.throw(3)).collect::<Vec<_>>()),
                _ if !owned.is_empty() => match owned.swap_remove(dice.throw(owned.len())) {
                    Owned::Parameter(p) => drop(p),
                    Owned::Tensor(t) => drop(t),
                    Owned::Device(d) => drop(d),
                    Owned::Tape(t) => drop(t),
                    Owned::Var(v) => drop(v),
                },
                _ => {}
            }
        }
        for (id, want, t) in &expected {
            let (gradients, _) = results.iter().find(|(_, of)| of == t).unwrap();
            let got = gradients.parameter(*id).unwrap().to_vec::<f64>().unwrap();
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-14), "case {seed}: {got:?}, not {want:?}");
        }
        drop(results);
        assert_eq!(watched.map_or(0, |device| device.meter().live()), 0, "case {seed} leaves memory");
    }
}

/// A tape without a seed refuses whatever draws, wherever it is asked for, and says how to give it one.
#[test]
fn a_tape_without_a_seed_draws_nothing() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[1, 3, 2, 4], 1, DType::F32)).unwrap();
    let flat = tape.leaf(&random(&device, &[3, 2, 4], 1, DType::F32)).unwrap();
    let options = AttentionOptions { dropout: 0.5, ..AttentionOptions::default() };
    let stochastic = Mark::Int8(Int8Spec { group: 64, rounding: Rounding::Stochastic });
    let refused = |what: &str, result: Result<Var>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Unseeded { .. }), "{what}: {error}");
        let text = error.to_string();
        assert!(text.contains(what) && text.contains("block.") && text.contains("seed: Some(seed)"), "{text}");
    };
    {
        let _scope = tape.scope("block");
        refused("dropout", x.clone().dropout(0.5));
        refused("attention", x.clone().attention(&x, &x, 0.5, true, 0.1));
        refused("attention", x.clone().scaled_dot_product_attention(&x, &x, None, options));
        refused("attention", flat.clone().attention_ragged(&flat, &flat, &[2, 1], &[2, 1], options));
        let y = x.clone().gelu().unwrap();
        refused("int8 with stochastic rounding", y.set_mark(stochastic).map(|()| y.clone()));
        // Nothing is drawn here.
        x.clone().dropout(0.0).unwrap();
        x.clone().attention(&x, &x, 0.5, true, 0.0).unwrap();
    }
    assert_eq!(tape.random_counter(), 0);

    // By scope and by policy the value is stored when its handle goes: in full, and the next call fails.
    let policy = RuleSet::new(["**.gelu=int8:rounding=stochastic".parse::<Rule>().unwrap()]);
    let by_policy = Tape::with(&device, TapeOptions { policy: Some(Rc::new(policy)), ..TapeOptions::default() });
    for (tape, scope) in [(&tape, Some(stochastic)), (&by_policy, None)] {
        let x = tape.leaf(&random(&device, &[8], 1, DType::F32)).unwrap();
        let block = retape_core::scope("block");
        let guard = tape.scope(if let Some(mark) = scope { block.mark(mark) } else { block });
        let _y = x.clone().gelu().unwrap().square().unwrap();
        drop(guard);
        refused("int8 with stochastic rounding", x.clone().gelu());
        // The next one is at liberty again.
        x.sigmoid().unwrap();
    }

    // The meta device draws no numbers.
    let device = meta();
    let tape = Tape::new(&device);
    let x = tape.leaf(&Tensor::full(&device, &[3, 4], DType::F32, 0.0).unwrap()).unwrap();
    let y = x.dropout(0.5).unwrap();
    y.set_mark(stochastic).unwrap();
    tape.backward(&y.square().unwrap().sum().unwrap()).unwrap();
}

/// Tapes of two seeds draw otherwise, tapes of one seed alike; also what is stored by stochastic rounding.
#[test]
fn the_mask_is_that_of_the_seed() {
    let device = cpu();
    let x = random(&device, &[1, 32, 1, 8], 1, DType::F32);
    let stochastic = Mark::Int8(Int8Spec { group: 64, rounding: Rounding::Stochastic });
    let draws: [fn(&Var, Mark) -> Result<Var>; 3] = [
        |x, _| x.clone().dropout(0.5),
        |x, _| x.clone().attention(x, x, 0.3, false, 0.5),
        |x, mark| {
            let y = x.clone().gelu()?;
            y.set_mark(mark)?;
            y.square()
        },
    ];
    for draw in draws {
        let bits = |seed: u64| {
            let tape = seeded(&device, seed);
            let leaf = tape.leaf(&x).unwrap();
            let y = draw(&leaf, stochastic).unwrap();
            let out = y.tensor().unwrap().to_bytes().unwrap();
            let gradients = tape.backward(&y.square().unwrap().sum().unwrap()).unwrap();
            (out, gradients.of(&leaf).unwrap().to_bytes().unwrap())
        };
        assert_eq!(bits(1), bits(1));
        assert_ne!(bits(1).1, bits(2).1);
    }
}

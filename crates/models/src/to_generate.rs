//! Models that will only generate: matrices laid out for that, and parameters straight from a GGUF file, its quantised blocks as they are.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_formats::gguf::model::Source;
use phalanx_formats::gguf::{GgmlType, GgufModel};
use phalanx_kernels::gemm::prepared::{Form, Layout, q4_0_to_q4};
use phalanx_nn::{Parameter, Walk, walk};
use phalanx_tensor::{Category, DType, PreparedMatrix, PreparedSpace, Runtime};

use crate::{Model, ModelError, Result};

/// How the matrices of a model that will only generate are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightForm {
    /// As in the file: the blocks of a GGUF file where there is a product for them (Q4_0, Q4_1, Q8_0), exact values otherwise.
    #[default]
    AsStored,
    /// Every value as it is.
    Exact,
    /// Rounded to blocks.
    Rounded(Form),
}

/// Lays out the matrices of a model whose weights are plain tensors; norms and biases stay as they are. From then on it generates, and nothing else. Where
/// the instruction set has another layout for exact weights, those stay as they are too.
///
/// # Errors
/// If a parameter has no value, or memory runs out.
pub fn lay_out(rt: &Runtime, model: &Model, form: WeightForm) -> Result<()> {
    let mut space = PreparedSpace::new();
    let kinds = kinds(model);
    for p in model.parameters() {
        let kind = kinds.get(p.name()).copied().unwrap_or_default();
        if p.shape().len() != 2 || p.prepared().is_some() || stays(kind, form) {
            continue;
        }
        let value = p.value()?;
        let form = match (form, value.dtype()) {
            (WeightForm::Rounded(form), _) => form,
            (_, DType::F32) => Form::F32,
            (_, DType::Bf16) => Form::Bf16,
        };
        if Layout::supported(form, rt.device()) {
            p.set_prepared(PreparedMatrix::from_tensor(rt, &mut space, form, &value)?)?;
        }
    }
    // What the matrices lay in before is not needed again.
    rt.pool().trim();
    Ok(())
}

/// The kind of the module that each parameter belongs to (of a tied one, the first).
fn kinds(model: &Model) -> HashMap<String, &'static str> {
    let (mut of_module, mut kinds) = (HashMap::new(), HashMap::new());
    walk(model, &mut |event| match event {
        Walk::Module(path, module) => drop(of_module.insert(path.to_owned(), module.kind())),
        Walk::Parameter(path, p) => {
            kinds.entry(p.name().to_owned()).or_insert_with(|| of_module.get(path).copied().unwrap_or_default());
        }
    });
    kinds
}

/// Whether matrices of this kind stay plain tensors: a router's, whose choices must not change, and those of experts that nothing is to be
/// rounded in, because their products are made together.
fn stays(kind: &str, form: WeightForm) -> bool {
    kind == "router" || kind == "expert_linear" && !matches!(form, WeightForm::Rounded(_))
}

/// Fills every parameter from a GGUF file: as plain tensors of the types that `dtype_of` names, or, with a `form`, matrices laid out for
/// inference.
///
/// # Errors
/// If a tensor is missing, mis-shaped or not finite, or memory runs out.
pub fn load_gguf(
    rt: &Runtime,
    model: &Model,
    file: &GgufModel,
    form: Option<WeightForm>,
    dtype_of: &dyn Fn(&str) -> DType,
) -> Result<()> {
    let mut space = PreparedSpace::new();
    for p in model.parameters() {
        let source = file.tensor(p.name())?;
        if source.rows() * source.row_len() != p.len() {
            return Err(phalanx_nn::NnError::Shape {
                name: p.name().into(),
                want: p.shape().to_vec(),
                got: vec![source.rows(), source.row_len()],
            }
            .into());
        }
        let dtype = dtype_of(p.name());
        let exact = if dtype == DType::F32 { Form::F32 } else { Form::Bf16 };
        let form = form.filter(|_| p.shape().len() == 2).map(|form| match (form, source.ty()) {
            (WeightForm::Rounded(form), _) => form,
            (WeightForm::AsStored, GgmlType::Q8_0) => Form::Q8,
            (WeightForm::AsStored, GgmlType::Q4_0 | GgmlType::Q4_1) => Form::Q4,
            _ => exact,
        });
        match form {
            Some(form) if Layout::supported(form, rt.device()) => prepared(rt, &mut space, &p, &source, form)?,
            _ => plain(rt, &p, &source, dtype)?,
        }
    }
    Ok(())
}

fn not_finite(source: &Source<'_>, index: usize) -> ModelError {
    ModelError::NotFinite { file: source.path().display().to_string(), tensor: source.name().into(), index }
}

fn plain(rt: &Runtime, p: &Parameter, source: &Source<'_>, dtype: DType) -> Result<()> {
    let mut wide = rt.empty(p.shape(), DType::F32, Category::Weights)?;
    source.read_rows(0..source.rows(), wide.f32_mut()?);
    if let Some(index) = wide.f32()?.iter().position(|x| !x.is_finite()) {
        return Err(not_finite(source, index));
    }
    p.set(if dtype == DType::F32 { wide } else { rt.cast(&wide, dtype, Category::Weights)? })?;
    Ok(())
}

fn prepared(rt: &Runtime, space: &mut PreparedSpace, p: &Parameter, source: &Source<'_>, form: Form) -> Result<()> {
    let (rows, k) = (source.rows(), source.row_len());
    let damaged = AtomicBool::new(false);
    let as_it_is =
        form == Form::Q8 && source.ty() == GgmlType::Q8_0 || form == Form::Q4 && source.ty() == GgmlType::Q4_1;
    let matrix = PreparedMatrix::from_rows(rt, space, form, [rows, k], &|i, out| {
        let finite = if as_it_is || form == Form::Q4 && source.ty() == GgmlType::Q4_0 {
            if as_it_is {
                out.copy_from_slice(source.row(i));
            } else {
                q4_0_to_q4(source.row(i), out);
            }
            // Only its scales can make a block what is no number.
            let half = |b: &[u8], at: usize| phalanx_kernels::f16::from_le_bytes([b[at], b[at + 1]]).is_finite();
            out.chunks_exact(form.row_bytes(1)).all(|b| half(b, 0) && (form == Form::Q8 || half(b, 2)))
        } else {
            let mut wide = vec![0f32; k];
            source.read_rows(i..i + 1, &mut wide);
            form.write_row(&wide, out);
            wide.iter().all(|x| x.is_finite())
        };
        if !finite {
            damaged.store(true, Ordering::Relaxed);
        }
    })?;
    if damaged.load(Ordering::Relaxed) {
        let mut row = vec![0f32; k];
        let bad = (0..rows).find_map(|i| {
            source.read_rows(i..i + 1, &mut row);
            row.iter().position(|x| !x.is_finite()).map(|at| i * k + at)
        });
        // Without such a value, a scale of Q4_0 was beyond what its minimum can say.
        return Err(not_finite(source, bad.unwrap_or(0)));
    }
    p.set_prepared(matrix)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;

    fn file(name: &str) -> GgufModel {
        GgufModel::open(format!("{}/../formats/tests/fixtures/{name}.gguf", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    fn model(file: &GgufModel) -> Model {
        let json = file.config().to_json(phalanx_formats::convert::FloatType::F32, None, None, None);
        Model::new(&ModelConfig::from_json("test", json).unwrap()).unwrap()
    }

    #[test]
    fn blocks_of_a_file_are_the_values_that_widening_gives() {
        let rt = Runtime::new(2);
        for name in ["llama-spm", "qwen3-bpe"] {
            let file = file(name);
            let (plain, as_stored, rounded) = (model(&file), model(&file), model(&file));
            load_gguf(&rt, &plain, &file, None, &|_| DType::F32).unwrap();
            load_gguf(&rt, &as_stored, &file, Some(WeightForm::AsStored), &|_| DType::F32).unwrap();
            load_gguf(&rt, &rounded, &file, Some(WeightForm::Rounded(Form::Q8)), &|_| DType::F32).unwrap();
            let mut forms = vec![];
            for (i, p) in plain.parameters().iter().enumerate() {
                let want = rt.to_vec(&p.value().unwrap()).unwrap();
                let stored = &as_stored.parameters()[i];
                let Some(m) = stored.prepared() else {
                    assert_eq!(rt.to_vec(&stored.value().unwrap()).unwrap(), want, "{}", p.name());
                    continue;
                };
                let mut got = vec![0f32; want.len()];
                let all: Vec<u32> = (0..m.shape()[0] as u32).collect();
                m.gather(&all, &mut got).unwrap();
                assert_eq!(got, want, "{} as {}", p.name(), m.form());
                rounded.parameters()[i].prepared().unwrap().gather(&all, &mut got).unwrap();
                let error = phalanx_testkit::rel_norm(&got, &want);
                assert!(error < 0.01, "{} rounded to 8 bits: {error}", p.name());
                forms.push(m.form());
            }
            assert!(forms.iter().any(|f| f.is_quantised()), "{name}: {forms:?}");
        }
    }
}

//! Balances weights for 8 bits: rescales channels to similar magnitudes without changing the
//! model's function.
//!
//! Activations in 8 bits share one scale per token, so a channel that is much larger than the
//! others leaves few quantization steps for the others. As in SmoothQuant (Xiao et al. 2023, with a
//! migration strength of 1/2), a channel is divided by `sqrt(a / w)`, and the weights that read the
//! channel are multiplied by the same factor. Here `a` is the channel's maximum magnitude and `w`
//! the largest weight that reads the channel. If `a` was not measured ([`ActivationMaxima`]), it is
//! estimated from the weights that write the channel. For a norm, the estimate is its weight; for a
//! projection, the L2 norm of its row after multiplication by the preceding norm's weights. Factors
//! are powers of two, so that scaling causes no rounding.
//!
//! Three kinds of channels are balanced: the outputs of the norms before attention and MLP (with
//! the weights that read them), the values (with the output projection), and the outputs of the up
//! projection (with the down projection). Experts are balanced by estimates, never by measured
//! magnitudes.
//!
//! A checkpoint that is written balanced (`quantize/`) has norms, biases and routers in formats of 16 bits,
//! which do not hold every product: there, factors are brought nearer to 1 ([`KeptForm`]).
//!
//! See docs/decisions/083-weights-are-balanced-before-quantizing.md.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use rayon::prelude::*;

use crate::device::{Activation, Dtype};
use crate::model::channels::{ActivationMaxima, Activations, LayerMaxima};
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::tensors::{EXPERT_NORM, NormNames, latent_input, recurrent_input};
use crate::model::weights::{StoredTensor, WeightSource, Weights};

/// Maximum magnitude of the exponent of a factor, a power of two.
const EXPONENT_MAX: f32 = 20.0;

/// The factors by which a tensor is multiplied.
#[derive(Debug, Clone, Default)]
pub(super) struct ChannelFactors {
    /// One factor per row, or per element of a vector.
    pub rows: Option<Vec<f32>>,
    pub columns: Option<Vec<f32>>,
}

/// A checkpoint's weights, balanced.
pub(super) struct BalancedWeights<'a> {
    inner: &'a dyn WeightSource,
    factors: HashMap<String, ChannelFactors>,
}

impl<'a> BalancedWeights<'a> {
    /// Balances with the factors of [`factors_of`].
    ///
    /// # Errors
    /// As [`factors_of`].
    pub(super) fn new(
        inner: &'a dyn WeightSource,
        config: &Config,
        channels: Option<&ActivationMaxima>,
    ) -> Result<BalancedWeights<'a>, ModelError> {
        let factors = factors_of(inner, config, channels, None)?;
        Ok(BalancedWeights { inner, factors })
    }

    /// The tensors that are rescaled, with their factors.
    pub(super) fn factors(&self) -> &HashMap<String, ChannelFactors> {
        &self.factors
    }
}

/// The tensors of a model that are rescaled, with their factors. Reads all weights once. `channels`: measured
/// magnitudes for a model of this shape. `stored`: the checkpoint, if what is no matrix is stored again in its
/// own formats.
///
/// # Errors
/// As [`WeightSource::tensor`]; or magnitudes are given for a model with experts.
pub(super) fn factors_of(
    inner: &dyn WeightSource,
    config: &Config,
    channels: Option<&ActivationMaxima>,
    stored: Option<&Weights>,
) -> Result<HashMap<String, ChannelFactors>, ModelError> {
    if channels.is_some() {
        ActivationMaxima::check_model(config)?;
    }
    let layers: Vec<Vec<(String, ChannelFactors)>> = (0..config.layers.len())
        .into_par_iter()
        .map(|layer| {
            let measured = channels.map(|channels| &channels.layers[layer]);
            BalancedLayer {
                inner,
                config,
                layer,
                measured,
                stored,
            }
            .factors()
        })
        .collect::<Result<_, _>>()?;
    Ok(layers.into_iter().flatten().collect())
}

/// The form in which a checkpoint stores a norm, bias or router.
pub(super) struct KeptForm {
    dtype: Dtype,
    /// What readers add to it: norms of some families are stored less 1.
    offset: f32,
}

impl KeptForm {
    pub(super) fn of(config: &Config, name: &str, dtype: Dtype) -> KeptForm {
        let is_less_1 = config.unit_offset_norms && name.ends_with("norm.weight");
        let offset = if is_less_1 { 1.0 } else { 0.0 };
        KeptForm { dtype, offset }
    }

    /// What is to be stored in place of `x` where its channel has a factor. It is not rounded to the format.
    pub(super) fn scaled(&self, x: f32, factor: f32) -> f32 {
        (x + self.offset) * factor - self.offset
    }

    /// Whether readers find `x` times the factor in what is stored: exactly, or, where they add 1, as near as
    /// the closest number of 16 bits. Near -1, what is stored is much coarser than that.
    fn holds(&self, x: f32, factor: f32) -> bool {
        let wanted = f64::from(x + self.offset) * f64::from(factor);
        let found = self.dtype.rounded(self.scaled(x, factor)) + self.offset;
        let rounding = match (self.offset == 0.0, self.dtype) {
            (true, _) => 0.0,
            (false, Dtype::Bf16) => 2f64.powi(-8),
            // F32 is stored more finely, and nothing of 8 bits needs that.
            (false, Dtype::F16 | Dtype::F32) => 2f64.powi(-11),
        };
        (f64::from(found) - wanted).abs() <= rounding * wanted.abs()
    }
}

impl WeightSource for BalancedWeights<'_> {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let tensor = self.inner.tensor(name, rows, columns)?;
        let Some(factors) = self.factors.get(name) else {
            return Ok(tensor);
        };
        let mut data = vec![0u8; tensor.rows * columns * Dtype::F32.bytes()];
        let view = tensor.view();
        let is_vector = rows.is_none();
        let rows = data.par_chunks_mut(columns * Dtype::F32.bytes()).enumerate();
        rows.for_each_init(
            || vec![0.0f32; columns],
            |values, (row, bytes)| {
                view.read_row(row, values);
                if let Some(columns) = &factors.columns {
                    values.iter_mut().zip(columns).for_each(|(x, f)| *x *= f);
                }
                match &factors.rows {
                    Some(rows) if is_vector => values.iter_mut().zip(rows).for_each(|(x, f)| *x *= f),
                    Some(rows) => values.iter_mut().for_each(|x| *x *= rows[row]),
                    None => {}
                }
                for (bytes, x) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                    *bytes = x.to_le_bytes();
                }
            },
        );
        Ok(StoredTensor {
            dtype: Dtype::F32,
            rows: tensor.rows,
            columns,
            data: Cow::Owned(data),
        })
    }

    fn shown(&self, name: &str) -> String {
        self.inner.shown(name)
    }

    fn path_of(&self, name: &str) -> &Path {
        self.inner.path_of(name)
    }
}

/// One layer, for which factors are computed.
struct BalancedLayer<'a> {
    inner: &'a dyn WeightSource,
    config: &'a Config,
    layer: usize,
    measured: Option<&'a LayerMaxima>,
    stored: Option<&'a Weights>,
}

impl BalancedLayer<'_> {
    /// Names of the layer's tensors that are rescaled, each with its factors.
    fn factors(&self) -> Result<Vec<(String, ChannelFactors)>, ModelError> {
        let c = self.config;
        let heads = c.heads_of(self.layer);
        let (dim, group) = (heads.head_dim, heads.heads / heads.kv_heads);
        let (q, kv, mlp, hidden) = (
            heads.q_width(),
            heads.kv_heads * dim,
            c.mlp_width(self.layer),
            c.hidden_size,
        );
        let mut scaled = Vec::new();
        let mut add = |name: String, rows: Option<Vec<f32>>, columns: Option<Vec<f32>>| {
            scaled.push((name, ChannelFactors { rows, columns }));
        };

        if !c.has_mixer(self.layer) {
            return self.mlp_factors(Vec::new(), Vec::new());
        }
        let norm = self.norm("input_layernorm.weight", hidden)?;
        let mut readers = self.mixer_inputs();
        let mixer = readers.len();
        if c.parallel_mlp {
            readers.extend([("mlp.gate_proj", mlp), ("mlp.up_proj", mlp)]);
        }
        let magnitudes = self.measured(Activations::AttentionNorm).unwrap_or(&norm);
        let mut of_norm = self.of_norm(magnitudes, &readers, hidden)?;
        self.hold(&mut of_norm, "input_layernorm.weight")?;
        add(self.name("input_layernorm.weight"), Some(inverse(&of_norm)), None);
        // A norm stands between these values and the output projection: its channels stay.
        let values_stay = c.is_recurrent(self.layer) || c.value_norm || c.latent.is_some();
        let balances_values = |part: &str| !values_stay && part == "self_attn.v_proj";
        for (part, _) in readers[..mixer].iter().filter(|(part, _)| !balances_values(part)) {
            add(self.name(&format!("{part}.weight")), None, Some(of_norm.clone()));
        }
        if values_stay {
            scaled.extend(self.mlp_factors(norm, of_norm)?);
            return Ok(scaled);
        }

        // Each query head of a group reads the same value channels.
        let by_query_head = self.column_maxima(&[("self_attn.o_proj", hidden)], q)?;
        let value_channel = |i: usize| i / dim / group * dim + i % dim;
        let max_by_value_channel = |values: &[f32]| {
            let mut maxima = vec![0.0f32; kv];
            for (i, x) in values.iter().enumerate() {
                maxima[value_channel(i)] = maxima[value_channel(i)].max(*x);
            }
            maxima
        };
        let weights = max_by_value_channel(&by_query_head);
        let magnitudes = match self.measured(Activations::Attended) {
            Some(attended) => max_by_value_channel(attended),
            None => self.row_norms("self_attn.v_proj", kv, &norm)?,
        };
        let mut of_values = factors(&magnitudes, &weights);
        self.hold(&mut of_values, "self_attn.v_proj.bias")?;
        add(
            self.name("self_attn.v_proj.weight"),
            Some(inverse(&of_values)),
            Some(of_norm.clone()),
        );
        add(self.name("self_attn.v_proj.bias"), Some(inverse(&of_values)), None);
        let columns = (0..q).map(|i| of_values[value_channel(i)]).collect();
        add(self.name("self_attn.o_proj.weight"), None, Some(columns));

        scaled.extend(self.mlp_factors(norm, of_norm)?);
        Ok(scaled)
    }

    /// The projections that read the output of the norm before attention or a recurrent layer, each
    /// with its rows.
    fn mixer_inputs(&self) -> Vec<(&'static str, usize)> {
        let c = self.config;
        match (&c.recurrent, c.latent) {
            (Some(recurrent), _) if recurrent.layers[self.layer] => recurrent_input(recurrent),
            (_, Some(latent)) => latent_input(c, latent),
            _ => {
                let heads = c.heads_of(self.layer);
                let [q, kv] = [heads.heads, heads.kv_heads].map(|count| count * heads.head_dim);
                let queries = [("self_attn.q_proj", q)];
                let has_kv = c.has_kv(self.layer);
                let keys = has_kv.then_some(("self_attn.k_proj", kv));
                let values = (has_kv && !c.values_are_keys(self.layer)).then_some(("self_attn.v_proj", kv));
                let gate = c.attention_gates.then_some(("self_attn.gate_proj", q));
                queries.into_iter().chain(keys).chain(values).chain(gate).collect()
            }
        }
    }

    /// As [`factors`](Self::factors), for the MLP or the experts. `norm` and `of_norm` are the weights
    /// and factors of attention's norm, which an MLP beside attention reads, too.
    fn mlp_factors(&self, norm: Vec<f32>, of_norm: Vec<f32>) -> Result<Vec<(String, ChannelFactors)>, ModelError> {
        let c = self.config;
        if !c.has_mlp(self.layer) {
            return Ok(Vec::new());
        }
        let plain = || vec![(c.mlp_name().to_owned(), c.mlp_width(self.layer))];
        let name = format!("{}.weight", NormNames::of(c).mlp);
        let Some(experts) = c.experts_of(self.layer) else {
            if c.parallel_mlp {
                return self.gated_factors(plain(), norm, of_norm);
            }
            return self.normed_factors(&name, plain(), &[]);
        };
        let of_expert = |i| (format!("mlp.experts.{i}"), experts.intermediate_size);
        let shared = experts.shared.as_ref();
        let shared = shared.map(|shared| ("mlp.shared_experts".to_owned(), shared.intermediate_size));
        let mlps = (0..experts.count).map(of_expert).chain(shared).collect();
        if experts.beside_mlp {
            // The router reads the stream through a norm of its own.
            let mut scaled = self.normed_factors(&name, plain(), &[])?;
            scaled.extend(self.normed_factors(EXPERT_NORM, mlps, &[])?);
            return Ok(scaled);
        }
        self.normed_factors(&name, mlps, &["mlp.gate.weight", "mlp.shared_expert_gate.weight"])
    }

    /// The factors of a norm, and of what reads its output: MLPs, each with its width, and routers.
    fn normed_factors(
        &self,
        name: &str,
        mlps: Vec<(String, usize)>,
        routers: &[&str],
    ) -> Result<Vec<(String, ChannelFactors)>, ModelError> {
        let hidden = self.config.hidden_size;
        let norm = self.norm(name, hidden)?;
        let parts = &["gate_proj", "up_proj"][usize::from(!self.config.activation.has_gate())..];
        let readers: Vec<(String, usize)> = mlps
            .iter()
            .flat_map(|(mlp, width)| parts.iter().map(move |part| (format!("{mlp}.{part}"), *width)))
            .collect();
        let readers: Vec<(&str, usize)> = readers.iter().map(|(name, width)| (&name[..], *width)).collect();
        let magnitudes = self.measured(Activations::MlpNorm).unwrap_or(&norm);
        let mut of_norm = self.of_norm(magnitudes, &readers, hidden)?;
        // The norm comes last: routers hold what is nearer to 1, too.
        for held in routers.iter().chain([&name]) {
            self.hold(&mut of_norm, held)?;
        }
        let factors = |rows, columns| ChannelFactors { rows, columns };
        let mut scaled = vec![(self.name(name), factors(Some(inverse(&of_norm)), None))];
        for router in routers {
            scaled.push((self.name(router), factors(None, Some(of_norm.clone()))));
        }
        scaled.extend(self.gated_factors(mlps, norm, of_norm)?);
        Ok(scaled)
    }

    /// The factors of MLPs that read the output of a norm with these weights, whose channels are
    /// divided by `of_norm`. The output of an up projection is read by one down projection.
    fn gated_factors(
        &self,
        mlps: Vec<(String, usize)>,
        norm: Vec<f32>,
        of_norm: Vec<f32>,
    ) -> Result<Vec<(String, ChannelFactors)>, ModelError> {
        let (c, hidden) = (self.config, self.config.hidden_size);
        let mut scaled = Vec::new();
        let mut add = |name: String, rows: Option<Vec<f32>>, columns: Option<Vec<f32>>| {
            scaled.push((name, ChannelFactors { rows, columns }));
        };
        for (mlp, width) in mlps {
            let name = |rest: &str| self.name(&format!("{mlp}.{rest}"));
            if c.activation.has_gate() {
                add(name("gate_proj.weight"), None, Some(of_norm.clone()));
            }
            if let Activation::ClampedSwiglu { .. } | Activation::SquaredRelu = c.activation {
                // What the down projection reads is not linear in `up`.
                add(name("up_proj.weight"), None, Some(of_norm.clone()));
                continue;
            }
            let weights = self.column_maxima(&[(&format!("{mlp}.down_proj"), hidden)], width)?;
            let mut of_up = match self.measured(Activations::Gated) {
                Some(gated) => factors(gated, &weights),
                None => factors(&self.row_norms(&format!("{mlp}.up_proj"), width, &norm)?, &weights),
            };
            self.hold(&mut of_up, &format!("{mlp}.up_proj.bias"))?;
            add(name("up_proj.weight"), Some(inverse(&of_up)), Some(of_norm.clone()));
            add(name("up_proj.bias"), Some(inverse(&of_up)), None);
            add(name("down_proj.weight"), None, Some(of_up));
        }
        Ok(scaled)
    }

    fn measured(&self, activations: Activations) -> Option<&[f32]> {
        self.measured.map(|channels| channels.of(activations))
    }

    fn name(&self, rest: &str) -> String {
        format!("model.layers.{}.{rest}", self.layer)
    }

    /// The factors of a norm's channels. What reads the residual stream itself keeps its channels,
    /// since other layers read them, too.
    fn of_norm(&self, magnitudes: &[f32], readers: &[(&str, usize)], hidden: usize) -> Result<Vec<f32>, ModelError> {
        if !self.config.pre_norms {
            return Ok(vec![1.0; hidden]);
        }
        Ok(factors(magnitudes, &self.column_maxima(readers, hidden)?))
    }

    /// Brings factors nearer to 1 until the stored tensor holds its channels with them. A vector is divided by
    /// them; a matrix reads the channels, and is multiplied.
    fn hold(&self, factors: &mut [f32], rest: &str) -> Result<(), ModelError> {
        let name = self.name(rest);
        let Some((stored, (header, location))) = self.stored.and_then(|of| Some((of, of.locate(&name).ok()?))) else {
            return Ok(());
        };
        let rows = match *header.tensors[&location.name].shape {
            [rows, _] => Some(rows),
            _ => None,
        };
        let tensor = stored.tensor(&name, rows, factors.len())?;
        let form = KeptForm::of(self.config, &name, tensor.dtype);
        let mut values = vec![0.0; factors.len()];
        for row in 0..tensor.rows {
            tensor.view().read_row(row, &mut values);
            for (x, factor) in values.iter().zip(&mut *factors) {
                let own = |factor: f32| if rows.is_none() { 1.0 / factor } else { factor };
                while *factor != 1.0 && !form.holds(*x, own(*factor)) {
                    *factor *= if *factor > 1.0 { 0.5 } else { 2.0 };
                }
            }
        }
        Ok(())
    }

    /// A norm's weights; ones if the model has no norms there.
    fn norm(&self, rest: &str, columns: usize) -> Result<Vec<f32>, ModelError> {
        if !self.config.pre_norms {
            return Ok(vec![1.0; columns]);
        }
        let tensor = self.inner.tensor(&self.name(rest), None, columns)?;
        let mut values = vec![0.0; columns];
        tensor.view().read_row(0, &mut values);
        Ok(values)
    }

    /// Calls `visit` with each row of a matrix.
    fn rows(&self, part: &str, rows: usize, columns: usize, mut visit: impl FnMut(&[f32])) -> Result<(), ModelError> {
        let tensor = self
            .inner
            .tensor(&self.name(&format!("{part}.weight")), Some(rows), columns)?;
        let mut values = vec![0.0; columns];
        for row in 0..rows {
            tensor.view().read_row(row, &mut values);
            visit(&values);
        }
        Ok(())
    }

    /// The largest magnitude in each column of all these matrices.
    fn column_maxima(&self, parts: &[(&str, usize)], columns: usize) -> Result<Vec<f32>, ModelError> {
        let mut maxima = vec![0.0f32; columns];
        for (part, rows) in parts {
            self.rows(part, *rows, columns, |row| {
                maxima.iter_mut().zip(row).for_each(|(max, x)| *max = max.max(x.abs()));
            })?;
        }
        Ok(maxima)
    }

    /// The L2 norm of each row after multiplication by the norm's weights.
    fn row_norms(&self, part: &str, rows: usize, norm: &[f32]) -> Result<Vec<f32>, ModelError> {
        let mut row_norms = Vec::with_capacity(rows);
        self.rows(part, rows, norm.len(), |row| {
            let squares = row.iter().zip(norm).map(|(x, g)| (x * g) * (x * g));
            row_norms.push(squares.sum::<f32>().sqrt());
        })?;
        Ok(row_norms)
    }
}

/// The factors by which channels are divided, from their magnitudes and the largest weights that
/// read them; see the module's description. The geometric mean is about 1. A channel with a zero
/// magnitude or weight keeps a factor of 1.
fn factors(magnitudes: &[f32], weights: &[f32]) -> Vec<f32> {
    let exponent = |(a, w): (&f32, &f32)| {
        let exponent = 0.5 * (a.abs() / w).log2();
        exponent.is_finite().then_some(exponent)
    };
    let exponents: Vec<Option<f32>> = magnitudes.iter().zip(weights).map(exponent).collect();
    let finite = exponents.iter().flatten();
    let mean = finite.clone().sum::<f32>() / finite.count().max(1) as f32;
    let factor = |exponent: &Option<f32>| {
        exponent.map_or(1.0, |p| {
            (p - mean).round_ties_even().clamp(-EXPONENT_MAX, EXPONENT_MAX).exp2()
        })
    };
    exponents.iter().map(factor).collect()
}

fn inverse(factors: &[f32]) -> Vec<f32> {
    factors.iter().map(|f| 1.0 / f).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_powers_of_two_around_one() {
        let found = factors(&[1.0, 100.0, 1.0, 0.0, -1.0], &[1.0, 0.01, 1.0, 1.0, 0.0]);
        // A channel that is zero on either side keeps a factor of 1.
        assert_eq!(found[3..], [1.0, 1.0]);
        assert_eq!(found[0], found[2]);
        assert!((64.0..=128.0).contains(&(found[1] / found[0])), "{found:?}");
        assert!(found.iter().all(|f| f.log2().fract() == 0.0));
        assert_eq!(inverse(&[4.0, 0.5]), [0.25, 2.0]);
    }

    #[test]
    fn what_is_stored_less_1_holds_factors_that_keep_it_from_minus_1() {
        let norm = |dtype| KeptForm { dtype, offset: 1.0 };
        let bf16 = norm(Dtype::Bf16);
        // 1.1 / 32 is stored as -0.96484375, which is 2 % off; a sixteenth less 1, as -1.
        for (x, factor, holds) in [
            (0.100_585_94, 0.5, true),
            (0.100_585_94, 1.0 / 32.0, false),
            (0.100_585_94, 1.0 / 128.0, false),
            (-0.9375, 1.0 / 32.0, false),
            (-0.9375, 1.0 / 16.0, true),
            (-0.9375, 16.0, true),
            (7.0, 1.0 / 8.0, true),
            (-1.0, 1.0 / 32.0, true),
            (f32::INFINITY, 0.5, false),
        ] {
            assert_eq!(bf16.holds(x, factor), holds, "{x} {factor}");
        }
        // Five bits are lost of F32's 24.
        assert!(norm(Dtype::F32).holds(0.100_585_94, 1.0 / 32.0));
        assert!(!norm(Dtype::F16).holds(0.100_585_94, 1.0 / 32.0));
    }

    #[test]
    fn what_is_stored_as_it_is_is_held_exactly_or_not() {
        let form = |dtype| KeptForm { dtype, offset: 0.0 };
        // F16 has 10 bits behind the point down to 2^-14, and ends above 65504.
        let x = 1.0 + 2f32.powi(-10);
        for (factor, holds) in [
            (2f32.powi(-14), true),
            (2f32.powi(-15), false),
            (2f32.powi(15), true),
            (2f32.powi(16), false),
        ] {
            assert_eq!(form(Dtype::F16).holds(x, factor), holds, "{factor}");
            assert!(form(Dtype::F16).holds(0.0, factor));
            assert!(form(Dtype::F32).holds(x, factor));
        }
        assert!(form(Dtype::Bf16).holds(1.5, 2f32.powi(-20)));
    }
}

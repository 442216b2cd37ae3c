//! A model's weights: from a source, tensor by tensor, to a device.

use crate::device::{Device, KvSpec, Linear, Tensor, TensorError};
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::weights::{RandomWeights, StoredTensor, WeightSource};

/// A model's weights on a device.
pub(super) struct ModelWeights<D: Device> {
    pub embedding: D::Matrix,
    /// `None`: the embedding table.
    pub head: Option<D::Matrix>,
    pub norm: D::Norm,
    pub layers: Vec<Layer<D>>,
}

/// One layer's.
pub(super) struct Layer<D: Device> {
    pub spec: KvSpec,
    pub attention_norm: D::Norm,
    pub qkv: Linear<D::Matrix, D::Vector>,
    pub qk_norm: Option<(D::Norm, D::Norm)>,
    pub o: Linear<D::Matrix, D::Vector>,
    pub post_attention_norm: Option<D::Norm>,
    pub mlp_norm: D::Norm,
    pub gate_up: Linear<D::Matrix, D::Vector>,
    pub down: Linear<D::Matrix, D::Vector>,
    pub post_mlp_norm: Option<D::Norm>,
}

/// The name of the norm before a layer's network, which some families have called by what comes before it.
pub(super) fn mlp_norm_name(config: &Config) -> &'static str {
    match config.post_norms {
        true => "pre_feedforward_layernorm",
        false => "post_attention_layernorm",
    }
}

/// Names of a kind of tensors (`weight`, `bias`) of parts.
fn named(parts: &[(String, usize)], kind: &str) -> Vec<(String, usize)> {
    let one = |(name, rows): &(String, usize)| (format!("{name}.{kind}"), *rows);
    parts.iter().map(one).collect()
}

/// Takes a model's tensors from a source to a device.
pub(super) struct Builder<'a, D: Device> {
    pub device: &'a D,
    pub source: &'a dyn WeightSource,
    /// Where they are random and the device makes them.
    pub random: Option<&'a RandomWeights>,
    pub config: &'a Config,
}

impl<D: Device> Builder<'_, D> {
    pub fn weights(&self) -> Result<ModelWeights<D>, ModelError> {
        let c = self.config;
        let embedding = self.table("model.embed_tokens.weight")?;
        let layers = c
            .layers
            .iter()
            .enumerate()
            .map(|(i, spec)| self.layer(&format!("model.layers.{i}"), *spec))
            .collect::<Result<_, _>>()?;
        let norm = self.norm("model.norm.weight", c.hidden_size)?;
        let head = match c.tied_embeddings {
            true => None,
            false => Some(self.table("lm_head.weight")?),
        };
        Ok(ModelWeights {
            embedding,
            head,
            norm,
            layers,
        })
    }

    fn layer(&self, prefix: &str, spec: KvSpec) -> Result<Layer<D>, ModelError> {
        let c = self.config;
        let dim = c.heads.head_dim;
        let (q, kv, mlp) = (c.heads.heads * dim, c.heads.kv_heads * dim, c.intermediate_size);
        let name = |rest: &str| format!("{prefix}.{rest}");
        let norm = |rest: &str, width: usize| self.norm(&name(&format!("{rest}.weight")), width);
        let post_norm = |rest: &str| match c.post_norms {
            true => norm(rest, c.hidden_size).map(Some),
            false => Ok(None),
        };
        let linear = |parts: &[(&str, usize)], columns: usize, bias: bool| {
            let full: Vec<(String, usize)> = parts.iter().map(|(rest, rows)| (name(rest), *rows)).collect();
            self.linear(&full, columns, bias)
        };
        Ok(Layer {
            spec,
            attention_norm: norm("input_layernorm", c.hidden_size)?,
            qkv: linear(
                &[
                    ("self_attn.q_proj", q),
                    ("self_attn.k_proj", kv),
                    ("self_attn.v_proj", kv),
                ],
                c.hidden_size,
                c.qkv_bias,
            )?,
            qk_norm: match c.qk_norm {
                true => Some((norm("self_attn.q_norm", dim)?, norm("self_attn.k_norm", dim)?)),
                false => None,
            },
            o: linear(&[("self_attn.o_proj", c.hidden_size)], q, c.o_bias)?,
            post_attention_norm: post_norm("post_attention_layernorm")?,
            mlp_norm: norm(mlp_norm_name(c), c.hidden_size)?,
            gate_up: self.gated(prefix)?,
            down: linear(&[("mlp.down_proj", c.hidden_size)], mlp, c.mlp_bias)?,
            post_mlp_norm: post_norm("post_feedforward_layernorm")?,
        })
    }

    fn linear(
        &self,
        parts: &[(String, usize)],
        columns: usize,
        bias: bool,
    ) -> Result<Linear<D::Matrix, D::Vector>, ModelError> {
        let biases = named(parts, "bias");
        Ok(Linear {
            weight: self.matrix(&named(parts, "weight"), columns)?,
            bias: if bias { Some(self.vector(&biases)?) } else { None },
        })
    }

    /// The gate and up projections of a layer.
    fn gated(&self, prefix: &str) -> Result<Linear<D::Matrix, D::Vector>, ModelError> {
        let c = self.config;
        let part = |name: &str| (format!("{prefix}.mlp.{name}"), c.intermediate_size);
        let parts = [part("gate_proj"), part("up_proj")];
        let weights = named(&parts, "weight");
        Ok(Linear {
            weight: self.taken(&weights, c.hidden_size, false, |views| self.device.gated_matrix(views))?,
            bias: match c.mlp_bias {
                true => Some(self.vector(&named(&parts, "bias"))?),
                false => None,
            },
        })
    }

    /// Matrices of equal width, (name, rows), stacked: made by the device, or taken over as `take` says.
    fn taken<S: AsRef<str>>(
        &self,
        parts: &[(S, usize)],
        columns: usize,
        is_table: bool,
        take: impl FnOnce(&[Tensor<'_>]) -> Result<D::Matrix, TensorError>,
    ) -> Result<D::Matrix, ModelError> {
        if let Some(random) = self.random {
            let parts: Vec<_> = parts
                .iter()
                .map(|(name, rows)| random.matrix(name.as_ref(), *rows, columns))
                .collect();
            return Ok(self.device.random_matrix(&parts, is_table)?);
        }
        let stored = parts
            .iter()
            .map(|(name, rows)| self.source.tensor(name.as_ref(), Some(*rows), columns))
            .collect::<Result<Vec<_>, _>>()?;
        let views: Vec<_> = stored.iter().map(StoredTensor::view).collect();
        take(&views).map_err(|e| self.refused(parts, e))
    }

    fn matrix<S: AsRef<str>>(&self, parts: &[(S, usize)], columns: usize) -> Result<D::Matrix, ModelError> {
        self.taken(parts, columns, false, |views| self.device.matrix(views))
    }

    /// The embedding table or the output head.
    fn table(&self, name: &str) -> Result<D::Matrix, ModelError> {
        let c = self.config;
        let part = [(name, c.vocab_size)];
        self.taken(&part, c.hidden_size, true, |views| self.device.table(views[0]))
    }

    /// Vectors, (name, length), one after the other.
    fn vector<S: AsRef<str>>(&self, parts: &[(S, usize)]) -> Result<D::Vector, ModelError> {
        let stored = parts
            .iter()
            .map(|(name, length)| self.source.tensor(name.as_ref(), None, *length))
            .collect::<Result<Vec<_>, _>>()?;
        let views: Vec<_> = stored.iter().map(StoredTensor::view).collect();
        self.device.vector(&views).map_err(|e| self.refused(parts, e))
    }

    fn norm(&self, name: &str, width: usize) -> Result<D::Norm, ModelError> {
        let stored = self.source.tensor(name, None, width)?;
        let norm = self.device.norm(stored.view());
        norm.map_err(|e| self.refused(&[(name, width)], e))
    }

    fn refused<S: AsRef<str>>(&self, parts: &[(S, usize)], error: TensorError) -> ModelError {
        match error {
            TensorError::NotFinite { part, .. } => {
                let name = parts[part].0.as_ref();
                ModelError::broken(self.source.path_of(name), format!("tensor `{name}`: {error}"))
            }
            TensorError::Device(error) => error.into(),
        }
    }
}

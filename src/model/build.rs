//! Moves a model's weights from a source to a device, tensor by tensor.

use crate::device::{
    Attention, Device, Dtype, ExpertWeights, KvSpec, LatentShape, Linear, QkNorm, RecurrentWeights, RopeStore,
    SharedExpert, Tensor, TensorError,
};
use crate::model::adapters_apart::{AdaptedLinear, LowRanks};
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::kv_layout::{KvLayout, LayerKv};
use crate::model::random_weights::RandomWeights;
use crate::model::tensors::{
    AttentionTensors, ExpertTensors, LatentTensors, LayerTensors, LinearTensors, MixerTensors, MlpTensors,
    ModelTensors, RecurrentTensors, TensorSpec, code_group,
};
use crate::model::weights::{StoredTensor, WeightSource};

/// A model's weights on a device.
pub(super) struct ModelWeights<D: Device> {
    pub embedding: D::Matrix,
    pub inputs: Option<AllInputsWeights<D>>,
    /// The output head. `None`: the embedding table serves as the head.
    pub head: Option<D::Matrix>,
    pub norm: D::Norm,
    pub layers: Vec<LayerWeights<D>>,
}

/// The weights of the inputs of all layers on a device.
pub(super) struct AllInputsWeights<D: Device> {
    pub table: D::Matrix,
    pub projection: LinearOn<D>,
    pub norm: D::Norm,
}

/// The weights of what a layer makes of its own inputs.
pub(super) struct InputWeights<D: Device> {
    pub gate: LinearOn<D>,
    pub projection: LinearOn<D>,
    pub post_norm: D::Norm,
}

/// One layer's weights on a device.
pub(super) struct LayerWeights<D: Device> {
    /// `None`: attention reads the residual stream as it is.
    pub attention_norm: Option<D::Norm>,
    /// `None`: the layer is an MLP or experts alone.
    pub mixer: Option<Mixer<D>>,
    pub o: Option<AdaptedLinear<D>>,
    pub post_attention_norm: Option<D::Norm>,
    pub mlp_norm: Option<D::Norm>,
    /// `None`: the layer is attention or a recurrence alone.
    pub mlp: Option<MlpWeights<D>>,
    pub post_mlp_norm: Option<D::Norm>,
    pub input: Option<InputWeights<D>>,
    /// Factor of the layer's output.
    pub scale: f32,
}

/// What mixes a layer's tokens, and its place in the memory of sequences.
pub(super) enum Mixer<D: Device> {
    Attention(AttentionWeights<D>),
    Latent(Box<LatentWeights<D>>),
    Recurrent {
        weights: RecurrentWeights<D::Matrix, D::Vector>,
        /// Index of the layer's pool of states.
        pool: usize,
    },
}

/// The weights of a layer's attention on a device, without the projection of its output.
pub(super) struct AttentionWeights<D: Device> {
    pub spec: KvSpec,
    pub kv: LayerKv,
    pub qkv: AdaptedLinear<D>,
    pub gate: Option<AdaptedLinear<D>>,
    pub qk_norm: Option<(D::Norm, Option<D::Norm>)>,
    pub sinks: Option<D::Vector>,
}

/// The weights of a layer's attention that keeps latents, without the projection of its output.
pub(super) struct LatentWeights<D: Device> {
    pub shape: LatentShape,
    pub kv: LayerKv,
    /// The projection of the latent that queries are made of, and its norm.
    pub query_latent: Option<(LinearOn<D>, D::Norm)>,
    pub queries: LinearOn<D>,
    pub latent: LinearOn<D>,
    pub norm: D::Norm,
    /// For each head the projection of keys, transposed: `[rank][plain_dim]`.
    pub keys: Linears<D>,
    /// For each head the projection of values: `[value_dim][rank]`.
    pub values: Linears<D>,
}

impl<D: Device> AttentionWeights<D> {
    /// The storing of keys and values in layer `index`.
    pub(super) fn store(&self, config: &Config, index: usize) -> RopeStore<'_, D::Norm> {
        let qk_norm = self.qk_norm.as_ref().map(|(q, k)| QkNorm {
            q,
            k: k.as_ref(),
            eps: config.norm_eps,
        });
        RopeStore {
            place: self.kv.place,
            qk_norm,
            value_norm: config.value_norm.then_some(config.norm_eps),
            rope: config.rope_of(index),
            stores: config.has_kv(index),
        }
    }

    pub(super) fn attention(&self, config: &Config) -> Attention {
        Attention {
            spec: self.spec,
            place: self.kv.place,
            scale: config.attention_scale,
            soft_cap: config.attention_soft_cap,
        }
    }
}

/// The weights of a layer's MLP on a device.
pub(super) enum MlpWeights<D: Device> {
    Plain {
        gate_up: AdaptedLinear<D>,
        down: AdaptedLinear<D>,
    },
    Experts(ExpertWeights<D::Matrix, D::Vector>),
    Both(Box<BothWeights<D>>),
}

/// The weights of an MLP and of experts beside it.
pub(super) struct BothWeights<D: Device> {
    pub gate_up: LinearOn<D>,
    pub down: LinearOn<D>,
    pub experts: ExpertWeights<D::Matrix, D::Vector>,
    pub router_norm: D::Norm,
    pub expert_norm: D::Norm,
    pub post_norms: [D::Norm; 2],
}

/// A linear operation on a device.
type LinearOn<D> = Linear<<D as Device>::Matrix, <D as Device>::Vector>;
/// Linear operations, of a layer's experts or of its heads.
type Linears<D> = Vec<LinearOn<D>>;

/// Copies a model's tensors from a source to a device.
pub(super) struct Builder<'a, D: Device> {
    pub device: &'a D,
    pub source: &'a dyn WeightSource,
    /// `Some`: the weights are random, and the device generates them itself.
    pub random: Option<&'a RandomWeights>,
    pub config: &'a Config,
    pub layout: &'a KvLayout,
    pub adapters: LowRanks<'a>,
}

impl<D: Device> Builder<'_, D> {
    pub(super) fn weights(&self) -> Result<ModelWeights<D>, ModelError> {
        let tensors = ModelTensors::of(self.config);
        // First the tables, the largest tensors: while one is read, its file's pages are in memory, too.
        let embedding = self.table(&tensors.embedding)?;
        let head = tensors.head.as_ref().map(|head| self.table(head)).transpose()?;
        let inputs = match &tensors.inputs {
            Some(inputs) => Some(AllInputsWeights {
                table: self.table(&inputs.table)?,
                projection: self.linear(&inputs.projection)?,
                norm: self.norm(&inputs.norm)?,
            }),
            None => None,
        };
        let layers = tensors.layers.iter().enumerate();
        let layers = layers
            .map(|(index, layer)| self.layer(index, layer))
            .collect::<Result<_, _>>()?;
        Ok(ModelWeights {
            embedding,
            inputs,
            layers,
            norm: self.scaled_norm(&tensors.norm, self.config.logit_scale)?,
            head,
        })
    }

    fn layer(&self, index: usize, tensors: &LayerTensors) -> Result<LayerWeights<D>, ModelError> {
        let norm = |tensor: &Option<TensorSpec>| tensor.as_ref().map(|tensor| self.norm(tensor)).transpose();
        Ok(LayerWeights {
            attention_norm: norm(&tensors.attention_norm)?,
            mixer: match &tensors.mixer {
                None => None,
                Some(MixerTensors::Attention(attention)) => Some(Mixer::Attention(self.attention(index, attention)?)),
                Some(MixerTensors::Latent(latent)) => Some(Mixer::Latent(Box::new(self.latent(index, latent)?))),
                Some(MixerTensors::Recurrent(recurrent)) => Some(Mixer::Recurrent {
                    weights: self.recurrent(recurrent)?,
                    pool: (0..index).filter(|layer| self.config.is_recurrent(*layer)).count(),
                }),
            },
            o: tensors.o.as_ref().map(|o| self.adapted(o, false)).transpose()?,
            post_attention_norm: norm(&tensors.post_attention_norm)?,
            mlp_norm: norm(&tensors.mlp_norm)?,
            mlp: tensors.mlp.as_ref().map(|mlp| self.mlp(mlp)).transpose()?,
            post_mlp_norm: norm(&tensors.post_mlp_norm)?,
            input: match &tensors.input {
                Some(input) => Some(InputWeights {
                    gate: self.linear(&input.gate)?,
                    projection: self.linear(&input.projection)?,
                    post_norm: self.norm(&input.post_norm)?,
                }),
                None => None,
            },
            scale: match &tensors.scale {
                Some(scale) => self.number(scale)?,
                None => 1.0,
            },
        })
    }

    fn attention(&self, index: usize, tensors: &AttentionTensors) -> Result<AttentionWeights<D>, ModelError> {
        let source = self.config.kv_sources[index].unwrap_or(index);
        let before = (0..source).filter(|layer| self.config.has_kv(*layer)).count();
        Ok(AttentionWeights {
            spec: self.config.layers[index],
            kv: self.layout.layers[before],
            qkv: self.adapted(&tensors.qkv, false)?,
            gate: match &tensors.gate {
                Some(gate) => Some(self.adapted(gate, false)?),
                None => None,
            },
            qk_norm: match &tensors.qk_norm {
                Some((q, k)) => Some((self.norm(q)?, k.as_ref().map(|k| self.norm(k)).transpose()?)),
                None if self.config.unit_qk_norm && self.config.rotates[index] => {
                    let dim = self.config.heads.head_dim;
                    Some((self.unit_norm(dim)?, Some(self.unit_norm(dim)?)))
                }
                None => None,
            },
            sinks: match &tensors.sinks {
                Some(sinks) => Some(self.vector(std::slice::from_ref(sinks))?),
                None => None,
            },
        })
    }

    fn latent(&self, index: usize, tensors: &LatentTensors) -> Result<LatentWeights<D>, ModelError> {
        let (keys, values) = self.latent_heads(tensors.shape, &tensors.heads)?;
        Ok(LatentWeights {
            shape: tensors.shape,
            kv: self.layout.layers[index],
            query_latent: match &tensors.query_latent {
                Some((linear, norm)) => Some((self.linear(linear)?, self.norm(norm)?)),
                None => None,
            },
            queries: self.linear(&tensors.queries)?,
            latent: self.linear(&tensors.latent)?,
            norm: self.norm(&tensors.norm)?,
            keys,
            values,
        })
    }

    /// The projections of keys, transposed, and those of values, which are stored as one matrix: head
    /// by head, and of a head the keys first.
    fn latent_heads(&self, shape: LatentShape, spec: &TensorSpec) -> Result<(Linears<D>, Linears<D>), ModelError> {
        let stored = self.source.tensor(&spec.name, spec.rows, spec.columns)?;
        let size = stored.dtype.bytes();
        let row = spec.columns * size;
        let heads = stored.data.chunks_exact((shape.plain_dim + shape.value_dim) * row);
        let (of_keys, of_values): (Vec<&[u8]>, Vec<&[u8]>) =
            heads.map(|head| head.split_at(shape.plain_dim * row)).unzip();
        let transposed = |keys: &&[u8]| -> Vec<u8> {
            let column = |i: usize| keys.chunks_exact(row).flat_map(move |row| &row[i * size..][..size]);
            (0..shape.rank).flat_map(column).copied().collect()
        };
        let transposed: Vec<Vec<u8>> = of_keys.iter().map(transposed).collect();
        let matrices = |rows: usize, columns: usize, heads: &[&[u8]]| {
            let views = heads.iter().copied().map(|data| Tensor {
                dtype: stored.dtype,
                rows,
                columns,
                data,
            });
            let views: Vec<Tensor<'_>> = views.collect();
            let weights = self.device.head_matrices(&views);
            let weights = weights.map_err(|e| self.tensor_error(&vec![spec.clone(); views.len()], e))?;
            let linear = |weight| Linear { weight, bias: None };
            Ok::<_, ModelError>(weights.into_iter().map(linear).collect())
        };
        let of_keys: Vec<&[u8]> = transposed.iter().map(Vec::as_slice).collect();
        let keys = matrices(shape.rank, shape.plain_dim, &of_keys)?;
        let values = matrices(shape.value_dim, shape.rank, &of_values)?;
        Ok((keys, values))
    }

    fn recurrent(&self, tensors: &RecurrentTensors) -> Result<RecurrentWeights<D::Matrix, D::Vector>, ModelError> {
        Ok(RecurrentWeights {
            shape: tensors.shape,
            input: self.linear(&tensors.input)?,
            conv: self.f32_vector(&tensors.conv)?,
            conv_bias: self.optional_f32_vector(tensors.conv_bias.as_ref())?,
            decay: self.f32_vector(&tensors.decay)?,
            decay_bias: self.f32_vector(&tensors.decay_bias)?,
            skip: self.optional_f32_vector(tensors.skip.as_ref())?,
            norm: self.f32_vector(&tensors.norm)?,
            norm_eps: tensors.norm_eps,
        })
    }

    fn mlp(&self, tensors: &MlpTensors) -> Result<MlpWeights<D>, ModelError> {
        Ok(match tensors {
            MlpTensors::Plain(mlp) => MlpWeights::Plain {
                gate_up: self.adapted(&mlp.gate_up, self.config.activation.has_gate())?,
                down: self.adapted(&mlp.down, false)?,
            },
            MlpTensors::Experts(tensors) => MlpWeights::Experts(self.experts(tensors, None)?),
            MlpTensors::Both(both) => {
                let [of_plain, of_experts] = &both.post_norms;
                let root = (self.config.hidden_size as f32).sqrt();
                MlpWeights::Both(Box::new(BothWeights {
                    gate_up: self.gated_linear(&both.plain.gate_up)?,
                    down: self.linear(&both.plain.down)?,
                    experts: self.experts(&both.experts, Some(&both.scales))?,
                    router_norm: self.scaled_norm(&both.router_norm, 1.0 / root)?,
                    expert_norm: self.norm(&both.expert_norm)?,
                    post_norms: [self.norm(of_plain)?, self.norm(of_experts)?],
                }))
            }
        })
    }

    fn experts(
        &self,
        tensors: &ExpertTensors,
        scales: Option<&TensorSpec>,
    ) -> Result<ExpertWeights<D::Matrix, D::Vector>, ModelError> {
        Ok(ExpertWeights {
            routing: tensors.routing,
            router: Linear {
                weight: self.uploaded(&tensors.router.weights, |views| self.device.router_matrix(views))?,
                bias: self.bias(&tensors.router)?,
            },
            correction: self.optional_f32_vector(tensors.correction.as_ref())?,
            scales: self.optional_f32_vector(scales)?,
            gate_up: self.expert_linears(
                tensors.experts.iter().map(|mlp| &mlp.gate_up),
                self.config.activation.has_gate(),
            )?,
            down: self.expert_linears(tensors.experts.iter().map(|mlp| &mlp.down), false)?,
            shared: match &tensors.shared {
                Some(shared) => Some(SharedExpert {
                    gate_up: self.gated_linear(&shared.gate_up)?,
                    down: self.linear(&shared.down)?,
                    is_weighted: tensors.router.weights.len() > 1,
                }),
                None => None,
            },
        })
    }

    /// A number that the checkpoint stores as a vector of one.
    fn number(&self, tensor: &TensorSpec) -> Result<f32, ModelError> {
        let stored = self.source.tensor(&tensor.name, tensor.rows, tensor.columns)?;
        let mut number = [0.0];
        stored.view().read_row(0, &mut number);
        if !number[0].is_finite() {
            let name = self.source.shown(&tensor.name);
            let what = format!("tensor `{name}` holds {}, which is not finite", number[0]);
            return Err(ModelError::broken(self.source.path_of(&tensor.name), what));
        }
        Ok(number[0])
    }

    fn optional_f32_vector(&self, tensor: Option<&TensorSpec>) -> Result<Option<D::Vector>, ModelError> {
        tensor.map(|tensor| self.f32_vector(tensor)).transpose()
    }

    fn f32_vector(&self, tensor: &TensorSpec) -> Result<D::Vector, ModelError> {
        let stored = self.source.tensor(&tensor.name, tensor.rows, tensor.columns)?;
        let vector = self.device.f32_vector(stored.view());
        vector.map_err(|e| self.tensor_error(std::slice::from_ref(tensor), e))
    }

    /// The linear operations of a layer's experts, or the single one in which the device stacks them.
    fn expert_linears<'t>(
        &self,
        experts: impl Iterator<Item = &'t LinearTensors> + Clone,
        is_gated: bool,
    ) -> Result<Linears<D>, ModelError> {
        // One product multiplies by the matrices of all experts.
        let coded = self.keeps_codes(experts.clone())?;
        if !self.device.stacks_experts() {
            return experts.map(|expert| self.linear_in(expert, is_gated, coded)).collect();
        }
        let (weights, biases): (Vec<_>, Vec<_>) = experts.map(|e| (&e.weights[..], &e.biases[..])).unzip();
        let stacked = LinearTensors {
            weights: weights.concat(),
            biases: biases.concat(),
            stored_instead: None,
        };
        Ok(vec![self.linear_in(&stacked, is_gated, coded)?])
    }

    /// A linear operation, with what adapters add to it.
    fn adapted(&self, tensors: &LinearTensors, is_gated: bool) -> Result<AdaptedLinear<D>, ModelError> {
        Ok(AdaptedLinear {
            linear: self.linear_in(tensors, is_gated, self.keeps_codes(std::iter::once(tensors))?)?,
            adapters: self.adapters.of(self.device, tensors, is_gated)?,
        })
    }

    fn linear(&self, tensors: &LinearTensors) -> Result<LinearOn<D>, ModelError> {
        self.linear_in(tensors, false, self.keeps_codes(std::iter::once(tensors))?)
    }

    /// The gate and up projections of an MLP, or the latter alone where there is no gate.
    fn gated_linear(&self, tensors: &LinearTensors) -> Result<LinearOn<D>, ModelError> {
        let is_gated = self.config.activation.has_gate();
        self.linear_in(tensors, is_gated, self.keeps_codes(std::iter::once(tensors))?)
    }

    /// Whether the device keeps the codes of all these matrices: their groups have one size then.
    fn keeps_codes<'t>(&self, linears: impl Iterator<Item = &'t LinearTensors>) -> Result<bool, ModelError> {
        Ok(self.device.keeps_codes() && code_group(self.source, linears)?.is_some())
    }

    /// Builds a linear layer, with a bias if there is one, for [`Device::gated_linear`] or others. `coded`: of codes of four
    /// bits.
    fn linear_in(&self, tensors: &LinearTensors, is_gated: bool, coded: bool) -> Result<LinearOn<D>, ModelError> {
        let parts = &tensors.weights;
        let weight = if coded {
            let codes = |part: &TensorSpec| self.source.codes(&part.name, part.rows.unwrap_or(1), part.columns);
            let codes = parts.iter().map(codes).collect::<Result<Vec<_>, _>>()?;
            let matrix = self.device.coded_matrix(&codes, is_gated);
            matrix.map_err(|e| self.tensor_error(parts, e))?
        } else if is_gated {
            self.stacked_matrix(parts, false, |views| self.device.gated_matrix(views))?
        } else {
            self.stacked_matrix(parts, false, |views| self.device.matrix(views))?
        };
        Ok(Linear {
            weight,
            bias: self.bias(tensors)?,
        })
    }

    fn bias(&self, tensors: &LinearTensors) -> Result<Option<D::Vector>, ModelError> {
        match &tensors.biases[..] {
            [] => Ok(None),
            biases => self.vector(biases).map(Some),
        }
    }

    /// Builds one matrix from matrices of equal width, stacked. The device generates them if they
    /// are random, else `upload` uploads them.
    fn stacked_matrix(
        &self,
        parts: &[TensorSpec],
        is_table: bool,
        upload: impl FnOnce(&[Tensor<'_>]) -> Result<D::Matrix, TensorError>,
    ) -> Result<D::Matrix, ModelError> {
        if let Some(random) = self.random {
            let parts: Vec<_> = parts
                .iter()
                .map(|part| random.matrix(&part.name, part.rows.unwrap_or(1), part.columns))
                .collect();
            return Ok(self.device.random_matrix(&parts, is_table)?);
        }
        self.uploaded(parts, upload)
    }

    /// Builds one matrix from matrices of the source.
    fn uploaded(
        &self,
        parts: &[TensorSpec],
        upload: impl FnOnce(&[Tensor<'_>]) -> Result<D::Matrix, TensorError>,
    ) -> Result<D::Matrix, ModelError> {
        let stored = self.stored(parts)?;
        let views: Vec<_> = stored.iter().map(StoredTensor::view).collect();
        upload(&views).map_err(|e| self.tensor_error(parts, e))
    }

    /// The embedding table or the output head.
    fn table(&self, tensor: &TensorSpec) -> Result<D::Matrix, ModelError> {
        let part = std::slice::from_ref(tensor);
        self.stacked_matrix(part, true, |views| self.device.embedding_table(views[0]))
    }

    /// Vectors, concatenated.
    fn vector(&self, parts: &[TensorSpec]) -> Result<D::Vector, ModelError> {
        let stored = self.stored(parts)?;
        let views: Vec<_> = stored.iter().map(StoredTensor::view).collect();
        self.device.vector(&views).map_err(|e| self.tensor_error(parts, e))
    }

    /// A norm times a factor: the factor of the logits in the norm before the output head, or that of
    /// what a router reads. A norm's weights are F32, so the factor costs no rounding of a matrix.
    fn scaled_norm(&self, tensor: &TensorSpec, factor: f32) -> Result<D::Norm, ModelError> {
        let stored = self.source.tensor(&tensor.name, tensor.rows, tensor.columns)?;
        let mut weights = vec![0.0; tensor.columns];
        stored.view().read_row(0, &mut weights);
        let scaled: Vec<u8> = weights.iter().flat_map(|w| (w * factor).to_le_bytes()).collect();
        let view = Tensor {
            dtype: Dtype::F32,
            rows: 1,
            columns: tensor.columns,
            data: &scaled,
        };
        let norm = self.device.norm(view);
        norm.map_err(|e| self.tensor_error(std::slice::from_ref(tensor), e))
    }

    fn norm(&self, tensor: &TensorSpec) -> Result<D::Norm, ModelError> {
        let part = std::slice::from_ref(tensor);
        let stored = self.source.tensor(&tensor.name, tensor.rows, tensor.columns)?;
        let norm = self.device.norm(stored.view());
        norm.map_err(|e| self.tensor_error(part, e))
    }

    /// A norm without weights, of `width` numbers. Turning pairs does not change a head's length, so it may be
    /// normalised before that.
    fn unit_norm(&self, width: usize) -> Result<D::Norm, ModelError> {
        let ones: Vec<u8> = std::iter::repeat_n(1.0f32.to_le_bytes(), width).flatten().collect();
        let norm = self.device.norm(Tensor {
            dtype: Dtype::F32,
            rows: 1,
            columns: width,
            data: &ones,
        });
        norm.map_err(|e| self.tensor_error(&[], e))
    }

    fn stored(&self, parts: &[TensorSpec]) -> Result<Vec<StoredTensor<'_>>, ModelError> {
        parts
            .iter()
            .map(|part| self.source.tensor(&part.name, part.rows, part.columns))
            .collect()
    }

    fn tensor_error(&self, parts: &[TensorSpec], error: TensorError) -> ModelError {
        match error {
            TensorError::NotFinite { part, .. } => {
                let name = &parts[part].name;
                let shown = self.source.shown(name);
                ModelError::broken(self.source.path_of(name), format!("tensor `{shown}`: {error}"))
            }
            TensorError::Device(error) => error.into(),
        }
    }
}

//! `gristmill inspect`: what a checkpoint is, what it needs and what it is refused for. Only
//! `config.json` must be there; of weights, the headers are read if they are there.
//!
//! Each check is the one that a job's model passes, too. Here a failed check does not hide the
//! others.

use std::path::Path;

use chrono::Utc;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::cli::args::InspectArgs;
use crate::cli::exit::{Exit, Failure, one_line};
use crate::cli::model_source::bring_description;
use crate::cli::prepare::print_warnings;
use crate::cli::sampling::default_sampling;
use crate::device::{Dtype, KvSpec, Precision};
use crate::gguf;
use crate::job::Generate;
use crate::job::chat::{ChatTemplate, Turn, form_of};
use crate::job::thinking::{ModelThinking, mentioned_delimiters};
use crate::model::config::{Config, ExpertForm, declared_dtype};
use crate::model::size::{CodedSize, ModelSize, Place, kv_bytes, read_as};
use crate::model::{ActivationMaxima, Checkpoint, folder};
use crate::report::summary::{counted, number, show_size};
use crate::tokenizer::{Tokenizer, TokenizerConfig, TokenizerError};

/// What is known of a checkpoint. What its files do not say is null.
#[derive(Debug, Default, Serialize)]
struct Inspection {
    model: String,
    architecture: Option<Architecture>,
    /// Memory on each device at each precision that it computes in.
    memory: Vec<Memory>,
    /// Whether weights are there, which need not be.
    weights: bool,
    /// Whether a tokenizer is there.
    tokenizer: bool,
    chat: Option<Chat>,
    /// The delimiters of thoughts, as in `plan --json`; without a tokenizer, as the chat template
    /// has them.
    thinking: Option<Value>,
    thinking_line: Option<String>,
    /// Sampling values of jobs that set none, as in `plan --json`.
    sampling: Option<Value>,
    sampling_line: Option<String>,
    warnings: Vec<String>,
    /// Why jobs of this model are refused, one line each.
    refused: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Architecture {
    family: &'static str,
    parameters: u64,
    /// Parameters that one token uses: of experts, those that the router chooses.
    active_parameters: u64,
    /// Number format of most weights: of those that are there, else as `config.json` says. For
    /// gpt-oss, that of the experts.
    format: Option<&'static str>,
    layers: usize,
    /// Layers whose attention is a sliding window.
    window_layers: usize,
    vocabulary: usize,
    /// Tokens that a sequence may have, unless a job sets `context`.
    context_tokens: u32,
    /// Maximum of a job's `context`.
    context_tokens_max: u32,
    /// Why GPUs do not run the model; null if they do.
    refused_on_gpu: Option<String>,
}

/// Memory of a model on a device, in bytes.
#[derive(Debug, Serialize)]
struct Memory {
    device: &'static str,
    precision: &'static str,
    weight_bytes: u64,
    /// For one token, without the rest of its block.
    kv_bytes_per_token: u64,
    /// For one sequence of `context_tokens` tokens, with its states in recurrent layers.
    kv_bytes_at_context: u64,
}

/// The chat templates of a checkpoint.
#[derive(Debug, Serialize)]
struct Chat {
    templates: Vec<String>,
    /// The form of the template that jobs use; null if it is no known one.
    form: Option<&'static str>,
}

pub(super) async fn inspect(args: InspectArgs) -> Result<Exit, Failure> {
    let model = bring_description(&args.model).await?;
    let inspection = tokio::task::block_in_place(|| Inspection {
        model: model.pinned.unwrap_or(args.model),
        ..Inspection::of(&model.dir)
    });
    print_warnings(&inspection.warnings);
    if args.json {
        println!("{}", inspection.to_json()?);
    } else {
        inspection.lines().iter().for_each(|line| println!("{line}"));
    }
    Ok(if inspection.refused.is_empty() {
        Exit::Done
    } else {
        Exit::BadJob
    })
}

impl Inspection {
    fn of(dir: &Path) -> Inspection {
        let mut found = Inspection::default();
        if let Err(error) = folder::check(dir) {
            // It is no checkpoint, or a damaged one: what else can be said would mislead.
            found.refuse(error);
            return found;
        }
        found.add_config(dir);
        let tokenizer = found.open_tokenizer(dir);
        if let (Some(tokenizer), Some(architecture)) = (&tokenizer, &found.architecture) {
            found.warnings.extend(tokenizer.warnings(dir, architecture.vocabulary));
        }
        found.add_chat(dir, tokenizer.as_ref());
        found.add_sampling(dir);
        found
    }

    fn refuse(&mut self, error: impl Into<anyhow::Error>) {
        self.refused.push(one_line(&error.into()));
    }

    /// Reads the configuration, and compares the weights with it if they are there.
    fn add_config(&mut self, dir: &Path) {
        self.weights = folder::has_weights(dir).unwrap_or_else(|error| {
            self.refuse(error);
            false
        });
        let config = Config::load(dir).and_then(|config| {
            if self.weights {
                let Checkpoint { config, weights } = Checkpoint::open(dir, None, config)?;
                let coded = CodedSize::of(&weights, &config)?;
                Ok((weights.main_dtype(), weights.main_blocks(), coded, config))
            } else {
                // Of quantized weights, the configuration names what they were rounded from.
                let declared = declared_dtype(dir)?.filter(|_| config.quantization.is_none());
                Ok((declared, None, CodedSize::default(), config))
            }
        });
        match config {
            Ok((stored, blocks, coded, config)) => {
                let architecture = Architecture::of(&config, stored, blocks);
                let runs_on = |place: &Place| *place == Place::Cpu || architecture.refused_on_gpu.is_none();
                let places = Place::ALL.into_iter().filter(runs_on);
                self.memory = memory(&config, coded, places, read_as(&config, stored));
                self.architecture = Some(architecture);
                if let Err(why) = ActivationMaxima::of_model(dir, &config, Precision::Int8) {
                    let why = one_line(&why.into());
                    self.warnings.push(format!("jobs in int8 are refused: {why}"));
                }
                self.warnings.extend(config.warnings);
            }
            Err(error) => self.refuse(error),
        }
    }

    fn open_tokenizer(&mut self, dir: &Path) -> Option<Tokenizer> {
        match Tokenizer::load(dir) {
            Ok(tokenizer) => {
                self.tokenizer = true;
                Some(tokenizer)
            }
            Err(TokenizerError::Missing(_)) => None,
            Err(error) => {
                self.refuse(error);
                None
            }
        }
    }

    fn add_chat(&mut self, dir: &Path, tokenizer: Option<&Tokenizer>) {
        let config = match TokenizerConfig::load(dir) {
            Ok(config) => config,
            // The tokenizer's error says the same.
            Err(_) if !self.refused.is_empty() && tokenizer.is_none() => return,
            Err(error) => return self.refuse(error),
        };
        if config.chat_templates.is_empty() {
            return;
        }
        let names = config.chat_templates.iter().map(|template| template.name.clone());
        let mut chat = Chat {
            templates: names.collect(),
            form: None,
        };
        match ChatTemplate::choose(&config, None, false, Utc::now().naive_utc()) {
            Ok(template) => {
                chat.form = form_of(template.source());
                if let Err(why) = self.add_thinking(&template, tokenizer) {
                    self.warnings.push(why);
                }
            }
            Err(why) => self
                .warnings
                .push(format!("`{}`: jobs with `prompt.messages`: {why}", dir.display())),
        }
        self.chat = Some(chat);
    }

    /// Determines the delimiters of thoughts for a job that sets nothing and has one user message.
    fn add_thinking(&mut self, template: &ChatTemplate, tokenizer: Option<&Tokenizer>) -> Result<(), String> {
        let Some(tokenizer) = tokenizer else {
            if let Some((open, close)) = mentioned_delimiters(template.source()) {
                self.thinking = Some(json!({"open": open, "close": close}));
                self.thinking_line = Some(format!(
                    "`{open}` … `{close}`, if the vocabulary has them as tokens: there is no tokenizer"
                ));
            }
            return Ok(());
        };
        let messages = vec![json!({"role": "user", "content": "x"})];
        let prompt = template.render(messages, &Map::new(), Turn::Generate)?;
        let thinking = ModelThinking::detect(&Generate::unset()?, tokenizer, Some(template), Some(&prompt))?;
        self.thinking = thinking.as_ref().map(ModelThinking::to_json);
        self.thinking_line = thinking.map(|thinking| thinking.describe());
        Ok(())
    }

    fn add_sampling(&mut self, dir: &Path) {
        match default_sampling(dir) {
            Ok((generate, warnings)) => {
                self.sampling = Some(generate.sampling_json());
                self.sampling_line = generate.sampling_line();
                self.warnings.extend(warnings);
            }
            // Without a readable configuration, that is the error.
            Err(_) if self.architecture.is_none() && !dir.join("generation_config.json").exists() => {}
            Err(failure) => self.refuse(failure.error),
        }
    }

    fn to_json(&self) -> Result<Value, serde_json::Error> {
        let mut value = serde_json::to_value(self)?;
        if let Value::Object(map) = &mut value {
            map.remove("thinking_line");
            map.remove("sampling_line");
            map.insert("runs".into(), self.refused.is_empty().into());
        }
        Ok(value)
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!("model       {}", self.model)];
        if let Some(architecture) = &self.architecture {
            lines.extend(architecture.lines());
        }
        let there = |is_there| if is_there { "there, and fit" } else { "not there" };
        if self.architecture.is_some() {
            lines.push(format!("weights     {}", there(self.weights)));
            if !self.tokenizer && self.refused.is_empty() {
                lines.push("tokenizer   not there".into());
            }
        }
        lines.extend(memory_table(&self.memory, self.architecture.as_ref()));
        let refused_on_gpu = self.architecture.as_ref().and_then(|it| it.refused_on_gpu.as_ref());
        lines.extend(refused_on_gpu.map(|why| format!("gpu         {why}")));
        if let Some(chat) = &self.chat {
            let form = chat.form.unwrap_or("no known form");
            lines.push(format!(
                "chat        {form} (template `{}`)",
                chat.templates.join("`, `")
            ));
        }
        for (name, line) in [("thinking", &self.thinking_line), ("sampling", &self.sampling_line)] {
            if let Some(line) = line {
                lines.push(format!("{name:<12}{line}"));
            }
        }
        if self.refused.is_empty() {
            let missing = match (self.weights, self.tokenizer) {
                (true, true) => "",
                (true, false) => " that is there; jobs need a tokenizer, too",
                (false, true) => " that is there; jobs need weights, too",
                (false, false) => " that is there; jobs need weights and a tokenizer, too",
            };
            lines.push(format!("refused     for nothing{missing}"));
        }
        lines.extend(self.refused.iter().map(|why| format!("refused     {why}")));
        lines
    }
}

impl Architecture {
    /// `stored`: the number format of the weights, if it is known; `blocks`: that of those in blocks.
    fn of(config: &Config, stored: Option<Dtype>, blocks: Option<gguf::Format>) -> Architecture {
        let windows = config.layers.iter().filter(|spec| matches!(spec, KvSpec::Window(_)));
        let size = ModelSize::of(config);
        let on_gpu = config.refuse_on_gpu();
        Architecture {
            family: config.family.name(),
            parameters: size.parameters(),
            active_parameters: size.active_parameters(),
            format: match (config.expert_form(), config.quantization) {
                _ if stored == Some(Dtype::F32) && blocks.is_some() => blocks.map(gguf::Format::name),
                (ExpertForm::Mxfp4, _) => Some("mxfp4"),
                (_, Some(quantization)) if stored.is_none_or(|stored| stored == Dtype::F32) => {
                    Some(quantization.method.name())
                }
                _ => stored.map(Dtype::name),
            },
            layers: config.layers.len(),
            window_layers: windows.count(),
            vocabulary: config.vocab_size,
            context_tokens: config.max_position_embeddings,
            context_tokens_max: config.context_limit(),
            refused_on_gpu: on_gpu.err().map(|error| one_line(&error.into())),
        }
    }

    fn lines(&self) -> Vec<String> {
        let windows = match self.window_layers {
            0 => String::new(),
            count => format!(", {} of them with a sliding window", number(count as u64)),
        };
        let scaled = if self.context_tokens_max > self.context_tokens {
            format!(
                ", up to {} where a job sets `context`",
                number(self.context_tokens_max.into())
            )
        } else {
            String::new()
        };
        let active = if self.active_parameters < self.parameters {
            format!(", {} of them for a token", number(self.active_parameters))
        } else {
            String::new()
        };
        let comma = if active.is_empty() { "" } else { "," };
        let format = self
            .format
            .map(|format| format!("{comma} in {format}"))
            .unwrap_or_default();
        vec![
            format!(
                "family      {}: {}{windows}",
                self.family,
                counted(self.layers as u64, "layer")
            ),
            format!("parameters  {}{active}{format}", number(self.parameters)),
            format!("context     {}{scaled}", counted(self.context_tokens.into(), "token")),
        ]
    }
}

/// `coded`: the weights that are stored in codes of four bits; a model without them is not run in four bits.
fn memory(config: &Config, coded: CodedSize, places: impl Iterator<Item = Place>, stored: Dtype) -> Vec<Memory> {
    let size = ModelSize::of(config).with_codes(coded);
    let mut memory = Vec::new();
    for place in places {
        let runs_in = |precision: &&Precision| **precision != Precision::W4a8 || coded.values > 0;
        for precision in place.precisions().iter().filter(runs_in) {
            let kv = |tokens| kv_bytes(config, place, precision.kv_format(), tokens);
            // A block's bytes are a multiple of its tokens; states of recurrent layers do not grow.
            let block_tokens = place.block_tokens();
            if let (Some(block), Some(at_context)) = (kv(block_tokens), kv(config.max_position_embeddings)) {
                memory.push(Memory {
                    device: place.name(),
                    precision: precision.name(),
                    weight_bytes: size.weight_bytes(place, *precision, stored),
                    kv_bytes_per_token: (block - config.state_bytes()) / u64::from(block_tokens),
                    kv_bytes_at_context: at_context,
                });
            }
        }
    }
    memory
}

fn memory_table(memory: &[Memory], architecture: Option<&Architecture>) -> Vec<String> {
    let Some(architecture) = architecture else {
        return Vec::new();
    };
    let header = format!(
        "memory      on   precision  weights    keys and values of a token, of {}",
        counted(architecture.context_tokens.into(), "token")
    );
    let row = |row: &Memory| {
        format!(
            "            {:<4} {:<10} {:<10} {:<26} {}",
            row.device,
            row.precision,
            show_size(row.weight_bytes),
            show_size(row.kv_bytes_per_token),
            show_size(row.kv_bytes_at_context)
        )
    };
    std::iter::once(header).chain(memory.iter().map(row)).collect()
}

//! The integration tests, one binary: its `mod` lines are the table of contents.

mod support;

mod bad_input;
mod bench_command;
mod calibrate;
mod chat_templates;
mod commands;
mod configs;
mod cuda_device;
mod cuda_kernels;
mod dataset_lines;
mod dataset_parquet;
mod end_to_end;
mod engine_batching;
mod generation_config;
mod job_files;
mod kernel_code;
mod kernel_speed;
mod kills;
mod ledger;
mod limits;
mod model_folders;
mod model_reference;
mod older_layout;
mod prompts;
mod proxy;
#[path = "proxy/tests.rs"]
mod proxy_tests;
mod queue_brokers;
mod queue_contract;
mod queue_doors;
mod queue_kafka;
mod queue_rabbitmq;
mod readers;
mod recheck;
mod rules;
mod schemas;
mod services;
mod store_s3;
mod tensors;
mod thinking;
mod thinking_demo;
mod thinking_models;
mod truncation;
mod worker_waits;
mod zero_rows;

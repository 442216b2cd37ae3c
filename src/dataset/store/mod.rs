//! Object stores and web servers: locations, clients and credentials, reads of one version of a
//! file, and error responses in one line.

pub mod aws_profile;
pub mod clients;
pub mod credentials;
pub mod error;
pub mod folders;
pub mod hosts;
pub mod job_inputs;
pub mod location;
pub mod pinned_file;
pub mod web;

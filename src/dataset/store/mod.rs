//! Object stores and web servers: locations, clients and credentials, pinned reads, and error
//! responses in one line.

pub mod aws_profile;
pub mod clients;
pub mod credentials;
pub mod error;
pub mod folders;
pub mod hosts;
pub mod location;
pub mod pinned;
pub mod pins;
pub mod web;

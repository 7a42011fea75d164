//! The compiled kernels: embedded where nvcc was there as this crate was built, else read from a folder.

use std::borrow::Cow;
use std::path::Path;

/// Overrides the folder that the kernels' images are read from.
const VARIABLE: &str = "RETAPE_CUDA_KERNELS";

/// Each source file's name, without its ending, and its image.
pub(crate) type Images = Vec<(&'static str, Cow<'static, [u8]>)>;

// Written by build.rs: `FILES`, the names of kernels/*.cu, and `EMBEDDED`, their images or None.
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The images from `folder`, else from the folder that the environment names, else those embedded.
pub(crate) fn images(folder: Option<&Path>) -> Result<Images, String> {
    let variable = std::env::var_os(VARIABLE);
    let folder = folder.or(variable.as_deref().map(Path::new));
    match (folder, EMBEDDED) {
        (Some(folder), _) => {
            let read = |file: &&'static str| {
                let path = folder.join(format!("{file}.fatbin"));
                let image = std::fs::read(&path).map_err(|e| format!("no kernels in {}: {e}", path.display()))?;
                Ok((*file, image.into()))
            };
            FILES.iter().map(read).collect()
        }
        (None, Some(images)) => Ok(images.iter().map(|(file, image)| (*file, Cow::Borrowed(*image))).collect()),
        (None, None) => Err(format!(
            "this build has no CUDA kernels in it, because no nvcc was found: run scripts/install-nvcc.sh (or set NVCC) and \
             build again, or name a folder of *.fatbin files in {VARIABLE}"
        )),
    }
}

# TANDEM_CUDA, TANDEM_NCCL, TANDEM_CUPTI, TANDEM_NVTX, TANDEM_MPI, TANDEM_GLOO: AUTO turns a backend on if its
# library and sources exist, ON demands it, OFF turns it off. This file prints which backends are off. Without
# a backend the library returns TD_UNSUPPORTED at run time, or works without it.

function(td_backend name what sources found)
  set(TANDEM_${name} AUTO CACHE STRING "${what}: AUTO, ON or OFF")
  set_property(CACHE TANDEM_${name} PROPERTY STRINGS AUTO ON OFF)
  set(choice "${TANDEM_${name}}")
  set(why "not found")
  if(DEFINED TANDEM_PROBE_${name} AND NOT TANDEM_PROBE_${name})
    set(why "found, but a program that uses it does not compile or link")
  endif()
  if(NOT choice MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "TANDEM_${name} is '${choice}', needs AUTO, ON or OFF")
  endif()
  set(TANDEM_HAVE_${name} OFF PARENT_SCOPE)
  if(choice STREQUAL "OFF")
    message(STATUS "TANDEM_${name}: off (asked for)")
  elseif(NOT found)
    if(choice STREQUAL "ON")
      message(FATAL_ERROR "TANDEM_${name}=ON, but ${what}: ${why}. Install it, name it in CMAKE_PREFIX_PATH, "
                          "or configure with -DTANDEM_${name}=AUTO")
    endif()
    message(STATUS "TANDEM_${name}: off (${what}: ${why}; install it and configure with -DTANDEM_${name}=ON)")
  elseif(NOT EXISTS "${PROJECT_SOURCE_DIR}/${sources}")
    if(choice STREQUAL "ON")
      message(FATAL_ERROR "TANDEM_${name}=ON, but tandem ${PROJECT_VERSION} has no ${sources} yet. "
                          "Configure with -DTANDEM_${name}=AUTO")
    endif()
    message(STATUS "TANDEM_${name}: off (${what} found, but tandem ${PROJECT_VERSION} has no ${sources} yet)")
  else()
    set(TANDEM_HAVE_${name} ON PARENT_SCOPE)
    message(STATUS "TANDEM_${name}: on")
  endif()
endfunction()

# td_compiles(NAME LANGUAGE FOLDERS LIBRARIES LINES...) sets <name>_found to whether a program of these lines
# compiles and links. A package may have a header without the headers that it includes. Each configuration
# tries a failed program again, because somebody may have installed what was missing.
include(CheckCSourceCompiles)
include(CheckCXXSourceCompiles)
function(td_compiles name language folders libraries)
  set(CMAKE_REQUIRED_INCLUDES ${folders})
  set(CMAKE_REQUIRED_LIBRARIES ${libraries})
  set(CMAKE_REQUIRED_QUIET ON)
  list(JOIN ARGN "\n" lines)
  if(NOT TANDEM_PROBE_${name})
    unset(TANDEM_PROBE_${name} CACHE)
  endif()
  if(language STREQUAL "C")
    check_c_source_compiles("${lines}\nint main(void) { return 0; }\n" TANDEM_PROBE_${name})
  else()
    check_cxx_source_compiles("${lines}\nint main() { return 0; }\n" TANDEM_PROBE_${name})
  endif()
  string(TOLOWER "${name}_found" found)
  set(${found} "${TANDEM_PROBE_${name}}" PARENT_SCOPE)
endfunction()

# The CUDA toolkit, from its package or in parts: nvcc, and cuBLAS from another place (ci/setup gets it from
# PyPI).
find_program(TANDEM_NVCC nvcc HINTS /usr/local/cuda/bin)
file(GLOB cublas_wheels "${PROJECT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/nvidia/cu13"
     "/usr/local/cuda/targets/x86_64-linux")
get_filename_component(nvcc_folder "${TANDEM_NVCC}" REALPATH)
get_filename_component(toolkit "${nvcc_folder}/../.." ABSOLUTE)
find_path(TANDEM_CUDART_INCLUDE cuda_runtime_api.h HINTS "${toolkit}/include" /usr/local/cuda/include)
find_library(TANDEM_CUDART NAMES cudart_static HINTS "${toolkit}/lib64" /usr/local/cuda/lib64)
find_path(TANDEM_CUBLASLT_INCLUDE cublasLt.h HINTS "${toolkit}/include" /usr/local/cuda/include ${cublas_wheels}
          PATH_SUFFIXES include)
find_library(TANDEM_CUBLASLT NAMES cublasLt libcublasLt.so.13 HINTS "${toolkit}/lib64" /usr/local/cuda/lib64 ${cublas_wheels}
             PATH_SUFFIXES lib)
mark_as_advanced(TANDEM_NVCC TANDEM_CUDART_INCLUDE TANDEM_CUDART TANDEM_CUBLASLT_INCLUDE TANDEM_CUBLASLT)
set(cuda_found OFF)
if(TANDEM_NVCC AND TANDEM_CUDART_INCLUDE AND TANDEM_CUDART AND TANDEM_CUBLASLT_INCLUDE AND TANDEM_CUBLASLT)
  td_compiles(CUDA C "${TANDEM_CUDART_INCLUDE};${TANDEM_CUBLASLT_INCLUDE}" "${TANDEM_CUDART};dl;rt;pthread;m"
              "#include <cuda_runtime_api.h>" "#include <cublasLt.h>")
endif()
td_backend(CUDA "the CUDA toolkit (nvcc, cudart and cuBLASLt)" impl/device/cuda.c "${cuda_found}")

if(TANDEM_HAVE_CUDA)
  include(TandemArchitectures)
  set(TANDEM_CUDA_ARCHITECTURES AUTO CACHE STRING
      "GPUs to build for: AUTO, or a list such as 90a;80-virtual, of sm_90a's code and of PTX of compute_80")
  set(TANDEM_CUDA_BUILT "${TANDEM_CUDA_ARCHITECTURES}")
  if(TANDEM_CUDA_BUILT STREQUAL "AUTO")
    find_program(TANDEM_NVIDIA_SMI nvidia-smi)
    mark_as_advanced(TANDEM_NVIDIA_SMI)
    td_gpus_seen("${TANDEM_NVIDIA_SMI}" seen)
    execute_process(COMMAND "${TANDEM_NVCC}" --list-gpu-arch OUTPUT_VARIABLE known)
    string(REGEX MATCHALL "[0-9]+" known "${known}")
    td_choose_architectures("${seen}" "${known}" TANDEM_CUDA_BUILT)
    message(STATUS "TANDEM_CUDA_ARCHITECTURES: ${TANDEM_CUDA_BUILT} (GPUs seen: ${seen})")
  endif()
  td_architecture_flags("${TANDEM_CUDA_BUILT}" TANDEM_CUDA_FLAGS)
  # TANDEM_CUDA_FLAGS names the architectures, in a form that every CMake accepts.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  set(CMAKE_CUDA_COMPILER "${TANDEM_NVCC}")
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  enable_language(CUDA)

  get_filename_component(TANDEM_CUDART_FOLDER "${TANDEM_CUDART}" DIRECTORY)
  get_filename_component(TANDEM_CUBLASLT_FOLDER "${TANDEM_CUBLASLT}" DIRECTORY)

  add_library(tandem_cudart STATIC IMPORTED GLOBAL)
  set_target_properties(tandem_cudart PROPERTIES IMPORTED_LOCATION "${TANDEM_CUDART}"
                        INTERFACE_LINK_LIBRARIES "dl;rt;pthread;stdc++")
  target_include_directories(tandem_cudart SYSTEM INTERFACE "${TANDEM_CUDART_INCLUDE}")
  # Only headers are needed. The library is loaded at its first use, from the loader's folders. This build
  # also searches the folder in which it was found.
  add_library(tandem_cublaslt INTERFACE)
  target_include_directories(tandem_cublaslt SYSTEM INTERFACE "${TANDEM_CUBLASLT_INCLUDE}")
  list(APPEND CMAKE_BUILD_RPATH "${TANDEM_CUBLASLT_FOLDER}")
endif()

# Only NCCL's header is needed. The library is loaded at its first use, from the loader's folders. This build
# also searches the folder in which it was found. PyPI's package has both.
set(nccl_wheels "")
foreach(venv "${PROJECT_SOURCE_DIR}/build/venv" "$ENV{VIRTUAL_ENV}")
  file(GLOB found "${venv}/lib/python3*/site-packages/nvidia/nccl")
  list(APPEND nccl_wheels ${found})
endforeach()
find_path(TANDEM_NCCL_INCLUDE nccl.h HINTS ${TANDEM_NCCL_ROOT} "${toolkit}" /usr/local/cuda ${nccl_wheels} PATH_SUFFIXES include)
find_library(TANDEM_NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${TANDEM_NCCL_ROOT} ${nccl_wheels} PATH_SUFFIXES lib)
mark_as_advanced(TANDEM_NCCL_INCLUDE TANDEM_NCCL_LIBRARY)
set(nccl_found OFF)
if(TANDEM_HAVE_CUDA AND TANDEM_NCCL_INCLUDE)
  td_compiles(NCCL C "${TANDEM_NCCL_INCLUDE};${TANDEM_CUDART_INCLUDE}" "" "#include <nccl.h>")
endif()
td_backend(NCCL "CUDA with NCCL's header nccl.h" impl/comm/cuda.c "${nccl_found}")
if(TANDEM_HAVE_NCCL AND TANDEM_NCCL_LIBRARY)
  get_filename_component(nccl_folder "${TANDEM_NCCL_LIBRARY}" DIRECTORY)
  list(APPEND CMAKE_BUILD_RPATH "${nccl_folder}")
endif()

# CUPTI and NVTX, for traces: only headers are needed. CUPTI is loaded when a GPU is traced. NVTX has no
# library.
file(GLOB cupti_wheels "${PROJECT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/nvidia/cu13")
find_path(TANDEM_CUPTI_INCLUDE cupti.h HINTS "${toolkit}/include" /usr/local/cuda/include ${cupti_wheels}
          PATH_SUFFIXES include extras/CUPTI/include ../extras/CUPTI/include)
find_path(TANDEM_CUDA_H_INCLUDE cuda.h HINTS "${toolkit}/include" /usr/local/cuda/include "${TANDEM_CUDART_INCLUDE}" ${cupti_wheels}
          PATH_SUFFIXES include)
find_library(TANDEM_CUPTI_LIBRARY NAMES libcupti.so.13 HINTS "${toolkit}" /usr/local/cuda ${cupti_wheels}
             PATH_SUFFIXES extras/CUPTI/lib64 lib64 lib)
find_path(TANDEM_NVTX_INCLUDE nvtx3/nvToolsExt.h HINTS "${toolkit}/include" /usr/local/cuda/include ${cupti_wheels} PATH_SUFFIXES include)
mark_as_advanced(TANDEM_CUPTI_INCLUDE TANDEM_CUDA_H_INCLUDE TANDEM_CUPTI_LIBRARY TANDEM_NVTX_INCLUDE)
set(cupti_found OFF)
if(TANDEM_CUPTI_INCLUDE AND TANDEM_CUDA_H_INCLUDE)
  file(STRINGS "${TANDEM_CUPTI_INCLUDE}/cupti_version.h" cupti_version REGEX "^#define CUPTI_API_VERSION +[0-9]+")
  string(REGEX MATCH "[0-9]+$" cupti_version "${cupti_version}")
  if(cupti_version GREATER_EQUAL 130000)
    td_compiles(CUPTI C "${TANDEM_CUPTI_INCLUDE};${TANDEM_CUDA_H_INCLUDE}" "" "#include <cupti.h>")
  endif()
endif()
td_backend(CUPTI "CUPTI's header cupti.h of CUDA 13" impl/trace/cupti.c "${cupti_found}")
set(cupti_folder "")
if(TANDEM_HAVE_CUPTI AND TANDEM_CUPTI_LIBRARY)
  get_filename_component(cupti_folder "${TANDEM_CUPTI_LIBRARY}" DIRECTORY)
endif()
set(nvtx_found OFF)
if(TANDEM_NVTX_INCLUDE)
  td_compiles(NVTX C "${TANDEM_NVTX_INCLUDE}" "dl" "#include <nvtx3/nvToolsExt.h>")
endif()
td_backend(NVTX "NVTX's header nvtx3/nvToolsExt.h" impl/trace/nvtx.c "${nvtx_found}")

find_package(MPI QUIET COMPONENTS C)
td_backend(MPI "an MPI library" impl/comm/mpi.c "${MPI_C_FOUND}")

find_package(Gloo QUIET)
set(gloo_found "${Gloo_FOUND}")
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  set(gloo_found OFF)
endif()
if(gloo_found AND NOT TANDEM_GLOO STREQUAL "OFF")
  enable_language(CXX)
  set(CMAKE_CXX_STANDARD 17)
  set(CMAKE_CXX_STANDARD_REQUIRED ON)
  set(CMAKE_CXX_EXTENSIONS OFF)
  td_compiles(GLOO CXX "" gloo "#include <gloo/allreduce.h>")
endif()
td_backend(GLOO "the Gloo library, or a C++ compiler for it," impl/comm/gloo.cpp "${gloo_found}")

foreach(name CUDA NCCL CUPTI NVTX MPI GLOO)
  list(APPEND states "${name} ${TANDEM_HAVE_${name}}")
endforeach()
list(JOIN states ", " backends)
message(STATUS "backends: ${backends}")

# The engines of collectives. This build loads them from the folder in which it builds them.
list(APPEND CMAKE_BUILD_RPATH "${PROJECT_BINARY_DIR}/impl")

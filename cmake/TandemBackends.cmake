# TANDEM_CUDA, TANDEM_MPI, TANDEM_GLOO: AUTO takes a backend where its library and its sources are there, ON insists,
# OFF leaves it out. A backend that is off answers TD_UNSUPPORTED at run time and says so here.

function(td_backend name what sources found)
  set(TANDEM_${name} AUTO CACHE STRING "${what}: AUTO, ON or OFF")
  set_property(CACHE TANDEM_${name} PROPERTY STRINGS AUTO ON OFF)
  set(choice "${TANDEM_${name}}")
  if(NOT choice MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "TANDEM_${name} is '${choice}', needs AUTO, ON or OFF")
  endif()
  set(TANDEM_HAVE_${name} OFF PARENT_SCOPE)
  if(choice STREQUAL "OFF")
    message(STATUS "TANDEM_${name}: off (asked for)")
  elseif(NOT found)
    if(choice STREQUAL "ON")
      message(FATAL_ERROR "TANDEM_${name}=ON, but ${what} was not found. Install it, name it in CMAKE_PREFIX_PATH, "
                          "or configure with -DTANDEM_${name}=AUTO")
    endif()
    message(STATUS "TANDEM_${name}: off (${what} not found; install it and configure with -DTANDEM_${name}=ON)")
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

find_program(TANDEM_NVCC nvcc HINTS /usr/local/cuda/bin)
mark_as_advanced(TANDEM_NVCC)
td_backend(CUDA "the CUDA toolkit (nvcc)" impl/device/cuda.c "${TANDEM_NVCC}")

find_package(MPI QUIET COMPONENTS C)
td_backend(MPI "an MPI library" impl/comm/mpi.c "${MPI_C_FOUND}")

find_package(Gloo QUIET)
td_backend(GLOO "the Gloo library" impl/comm/gloo.cpp "${Gloo_FOUND}")

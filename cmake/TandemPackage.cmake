# The Python package (pip install .): libtandem and the program, once for each instruction set. At import
# tandem/library.py chooses the best build that the processor can run.

include(ExternalProject)

set(TANDEM_PACKAGE_MARCH "" CACHE STRING
    "Instruction sets, as in -march=; empty: x86-64-v3 and v4, or native on other processors")
set(builds ${TANDEM_PACKAGE_MARCH})
if(NOT builds)
  set(builds native)
  if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    set(builds x86-64-v3 x86-64-v4)
  endif()
endif()

# A missing library is one line, before the builds begin.
set(missing "")
foreach(pair "dnnl.h libdnnl-dev" "cjson/cJSON.h libcjson-dev" "gloo/allreduce.h libgloo-dev")
  string(REPLACE " " ";" pair "${pair}")
  list(GET pair 0 header)
  list(GET pair 1 package)
  find_path(TANDEM_FOLDER_OF_${package} "${header}")
  if(NOT TANDEM_FOLDER_OF_${package})
    string(APPEND missing " ${package}")
  endif()
endforeach()
find_program(TANDEM_PKG_CONFIG pkg-config)
if(NOT TANDEM_PKG_CONFIG)
  string(APPEND missing " pkg-config")
endif()
if(missing)
  message(FATAL_ERROR " tandem needs libraries of the system; on Debian and Ubuntu: apt-get install${missing}")
endif()

# The options of this configuration hold for each build. "|" stands for ";" in lists.
get_cmake_property(names CACHE_VARIABLES)
set(chosen "")
foreach(name IN LISTS names)
  if(name MATCHES "^(TANDEM_(CUDA|NCCL|CUPTI|NVTX|MPI|GLOO|CUDA_ARCHITECTURES|NCCL_ROOT)|CMAKE_(CUDA_COMPILER|PREFIX_PATH))$")
    string(REPLACE ";" "|" value "${${name}}")
    list(APPEND chosen "-D${name}=${value}")
  endif()
endforeach()

add_custom_target(package)
foreach(march IN LISTS builds)
  set(folder "${PROJECT_BINARY_DIR}/${march}")
  ExternalProject_Add(build-${march} SOURCE_DIR "${PROJECT_SOURCE_DIR}" BINARY_DIR "${folder}/build" PREFIX "${folder}/steps"
    CMAKE_ARGS -DTANDEM_MARCH=${march} -DTANDEM_TESTS=OFF -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=${folder}/installed
               -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON
               -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF ${chosen}
    LIST_SEPARATOR "|" EXCLUDE_FROM_ALL ON BUILD_ALWAYS ON USES_TERMINAL_BUILD ON)
  add_dependencies(package build-${march})
  install(DIRECTORY "${folder}/installed/lib/" DESTINATION "built/${march}/lib" FILES_MATCHING PATTERN "*.so" PATTERN "*.cdef")
  install(PROGRAMS "${folder}/installed/bin/tandem" DESTINATION "built/${march}/bin")
endforeach()
